"""What do checkpoints cost?"""
