"""The zoo: modules of tests, as users write them; nearly all of them know nothing of `lightning_hybrid`.

- `basic`: small LightningModules around one `nn.Sequential`, with the data of all modules here.
- `frame`: bodies that are no chain: lists, loops, skips, several stacks.
- `tensor`: layers for tensor parallelism; `tensor_frame`: the same in bodies that are no chain.
- `context`: models of sequences, which context parallelism divides.
- `own_blocks`: blocks of a user's own, some of which cannot be divided.
- `layouts`: the models of the table of models and layouts.
- `public`: public modules rewritten as their authors write them; `hugging_face`: models of transformers.
- `teacher`: self-supervision with a momentum encoder.
- `coupled_losses`: losses that couple the samples of a batch.
"""
