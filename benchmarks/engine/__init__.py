"""What the pipeline engine costs, against `torch.distributed.pipelining`."""
