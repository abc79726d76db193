"""What transparency means: a module trained under a layout, the oracle that it must equal, the comparison.

::

    SUBJECTS x LAYOUTS x SCHEDULES --cover--> case --+--> HybridStrategy on live ranks --> a Record of each rank -----+
                                                     |                                                          compare
                                                     `--> oracle: plain Lightning -------> a Record of each process --+

The oracle is plain Lightning. Which one it is depends on what the numbers mean:

- ``"joined"``: one process with the batches of all replicas joined.
- ``"ddp"``: Lightning's DDP with as many replicas, where the mean over *replicas* is the meaning.
- ``microbatched=True``: the process (or each DDP process) runs the microbatches one by one and adds up their losses:
  for layers with batch statistics, and where random numbers are drawn.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hybrid import HybridStrategy, Launch, Tuning
from lightning_hybrid.distributed.dtensor import full_tensor, is_tensor_parallel
from lightning_hybrid.distributed.random import derive_seed, seed_generators
from lightning_hybrid.distributed.tensor_metadata import METADATA
from lightning_hybrid.pipeline_parallel.body import find_body
from lightning_hybrid.strategy.layout import find_stages
from lightning_hybrid.tensor_parallel.context_parallel.attention import KINDS
from tests.devices import devices_of
from tests.zoo import basic as zoo
from tests.zoo import context as context_zoo
from tests.zoo import experts as expert_zoo
from tests.zoo import frame as frame_zoo
from tests.zoo import hugging_face as hf_zoo
from tests.zoo import public as public_zoo
from tests.zoo import tensor as tensor_zoo
from tests.zoo import tensor_frame as tensor_frame_zoo

SEED = 7
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")
MIN_STEPS = 10


@dataclass(frozen=True)
class Subject:
    """A module, and what it needs to be trained.

    Attributes:
        name: Its name in the list of cases.
        module: Its class.
        strategy: Arguments of `HybridStrategy` that go before those of a layout.
        trainer: Arguments of the `Trainer`, with and without the strategy.
        replicas: The oracle where there are several replicas.
        microbatched: Whether the oracle runs microbatches.
        layers_draw: Whether layers draw random numbers, so that the oracle needs the stages.
        in_float32: Whether its own code computes in float32, whatever the precision of its parameters.
    """

    name: str
    module: type[zoo.Example]
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    replicas: str = "joined"
    microbatched: bool = False
    layers_draw: bool = False
    in_float32: bool = False


@dataclass(frozen=True)
class Layout:
    """Ranks and stages."""

    name: str
    pipeline: int = 1
    data: int = 1
    chunks: int = 1
    microbatches: int | str = "auto"
    tensor: int = 1
    mode: str = "1d"
    depth: int = 1
    sequence_parallel: bool = False
    rank_order: str = "pp-dp-tp"
    partition: str = "uniform"
    zero: int = 0
    zero_size: int | None = None
    experts: int | str = 1
    reshards: bool | str = "auto"
    recompute: bool | str = False
    context: int = 1
    context_kind: str = "ulysses"

    @property
    def size(self) -> int:
        return self.pipeline * self.data * self.tensor * self.context


@dataclass(frozen=True)
class Case:
    subject: str
    layout: str
    schedule: str
    double: bool = True
    accelerator: str = "cpu"

    def __str__(self) -> str:
        return f"{self.subject}-{self.layout}-{self.schedule}"

    @property
    def size(self) -> int:
        return layout_of(self.layout).size


@dataclass(frozen=True)
class OracleKey:
    """What an oracle's numbers depend on.

    Attributes:
        subject: The module.
        data: The number of replicas.
        double: Whether it trains in double precision.
        microbatches: How many; ``None`` for whole batches.
        stages: Where layers draw: those of each stage, which have one stream, if they are a chain.
        layers: Likewise: the names of those that have a stream each, if they are units.
        accelerator: Lightning's name of what computes.
    """

    subject: str
    data: int
    double: bool
    microbatches: int | None = None
    stages: tuple[range, ...] | None = None
    layers: tuple[str, ...] = ()
    accelerator: str = "cpu"

    @property
    def size(self) -> int:
        return self.data if subject_of(self.subject).replicas == "ddp" else 1


def _named(items: Iterable[Any]) -> dict[str, Any]:
    return {item.name: item for item in items}


SUBJECTS: dict[str, Subject] = _named(
    [
        Subject("plain", zoo.Plain),
        Subject("momentum", zoo.Momentum),
        Subject("around", zoo.Around),
        Subject("residual", zoo.Residual),
        Subject("tied", zoo.Tied),
        Subject("shared_layer", zoo.SharedLayer),
        Subject("shared_parameter", zoo.SharedParameter),
        Subject("dict_activations", zoo.DictActivations),
        Subject("tuple_activations", zoo.TupleActivations),
        Subject("ragged", zoo.Ragged),
        Subject("few", zoo.Few),
        Subject("varying_length", zoo.VaryingLength),
        Subject("token_weighted", zoo.TokenWeighted),
        # The mean over replicas of sums over samples, as DDP has it.
        Subject("summed", zoo.Summed, strategy={"loss_reduction": "sum"}, replicas="ddp"),
        # Statistics belong to a replica's microbatch.
        Subject("normalised", zoo.Normalised, {"num_microbatches": 3}, replicas="ddp", microbatched=True),
        Subject("frozen_first", zoo.FrozenFirst),
        Subject("frozen_middle", zoo.FrozenMiddle),
        Subject("frozen_last", zoo.FrozenLast),
        Subject("thawing", zoo.Thawing),
        Subject("without_parameters", zoo.WithoutParameters),
        Subject("in_place", zoo.InPlace),
        # Replicas draw different numbers.
        Subject("noisy", zoo.Noisy, {"num_microbatches": 3}, replicas="ddp", microbatched=True),
        Subject("augmenting", zoo.Augmenting, {"num_microbatches": 3}, replicas="ddp", microbatched=True),
        Subject("dropping", zoo.Dropping, {"num_microbatches": 3}, replicas="ddp", microbatched=True, layers_draw=True),
        Subject("branching", zoo.Branching),
        Subject("branching_accumulated", zoo.Branching, trainer={"accumulate_grad_batches": 2}),
        Subject("unused", zoo.Unused),
        Subject("nested", zoo.Nested),
        Subject("configured", zoo.Configured),
        Subject("grouped", zoo.Grouped),
        Subject("plateau", zoo.Plateau),
        Subject("clipped_by_norm", zoo.Residual, trainer={"gradient_clip_val": 0.05}),
        Subject(
            "clipped_by_value",
            zoo.Momentum,
            trainer={"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"},
        ),
        Subject("accumulated", zoo.Ragged, trainer={"accumulate_grad_batches": 2}),
        Subject("classifier", zoo.Classifier),
        Subject("outputs", zoo.Outputs),
        Subject("dataclass_batch", zoo.DataclassBatch),
        Subject("namedtuple_batch", zoo.NamedTupleBatch),
    ]
)

LAYOUTS: dict[str, Layout] = _named(
    [
        Layout("m3", microbatches=3),
        Layout("chunks3", chunks=3, microbatches=4),
        Layout("dp2", data=2),
        Layout("pp2", pipeline=2, microbatches=4),
        Layout("pp2_chunks3", pipeline=2, chunks=3, microbatches=4),
        Layout("pp3", pipeline=3, microbatches=5),
        Layout("pp3_chunks2", pipeline=3, chunks=2, microbatches=6),
        Layout("pp4", pipeline=4),
        Layout("pp2_dp2", pipeline=2, data=2, microbatches=4, rank_order="dp-pp-tp"),
        Layout("pp2_dp2_chunks2", pipeline=2, data=2, chunks=2, microbatches=3, partition="parameters"),
    ]
)


#: For layers that are shared by several ranks: each subject under each layout.
TENSOR_SUBJECTS: dict[str, Subject] = _named(
    [
        Subject("encoders", tensor_zoo.Encoders),
        Subject("sequence_first", tensor_zoo.SequenceFirst),
        Subject("decoders", tensor_zoo.Decoders),
        Subject("own_attention", tensor_zoo.OwnAttention),
        Subject("mlps", tensor_zoo.MLPs, trainer={"accumulate_grad_batches": 2}),
        Subject("tied_words", tensor_zoo.TiedWords, trainer={"gradient_clip_val": 0.1}),
        Subject("gpt", tensor_zoo.GPT),
        Subject("vit", tensor_zoo.ViT),
        Subject("resnet", tensor_zoo.ResNet, strategy={"tensor_parallel_plan": None}),
    ]
)

TENSOR_LAYOUTS: dict[str, Layout] = _named(
    [
        Layout("tp2", tensor=2),
        Layout("tp4", tensor=4, microbatches=2),
        Layout("tp2_pp2", tensor=2, pipeline=2, microbatches=3),
        Layout("tp2_pp2_chunks2", tensor=2, pipeline=2, chunks=2, microbatches=4, rank_order="dp-pp-tp"),
        Layout("tp2_dp2", tensor=2, data=2, rank_order="tp-dp-pp"),
        Layout("tp2_sequence", tensor=2, sequence_parallel=True),
        Layout("tp4_sequence", tensor=4, sequence_parallel=True, microbatches=2),
        Layout(
            "tp2_pp2_sequence",
            tensor=2,
            pipeline=2,
            microbatches=4,
            sequence_parallel=True,
            rank_order="tp-dp-pp",
        ),
        Layout("tp2_pp2_chunks2_sequence", tensor=2, pipeline=2, chunks=2, microbatches=4, sequence_parallel=True),
        Layout("tp2_pp2_dp2", tensor=2, pipeline=2, data=2, microbatches=4),
        Layout("tp2_pp2_dp2_sequence", tensor=2, pipeline=2, data=2, microbatches=4, sequence_parallel=True),
    ]
)


#: Tensor-parallel ranks in two and three dimensions: what is divided into blocks.
GRID_LAYOUTS: dict[str, Layout] = _named(
    [
        Layout("grid2d", tensor=4, mode="2d", microbatches=2),
        Layout("grid2.5d_depth1", tensor=4, mode="2.5d", microbatches=3),
        Layout("grid2d_recompute", tensor=4, mode="2d", microbatches=3, recompute=True),
        Layout("grid2.5d", tensor=8, mode="2.5d", depth=2, microbatches=2),
        Layout("grid3d", tensor=8, mode="3d", microbatches=2),
        Layout("grid2d_pp2", tensor=4, mode="2d", pipeline=2, microbatches=4),
        Layout("grid2d_dp2", tensor=4, mode="2d", data=2, rank_order="tp-dp-pp"),
        Layout("grid2d_dp2_zero1", tensor=4, mode="2d", data=2, zero=1),
        Layout("grid2d_dp2_zero3", tensor=4, mode="2d", data=2, zero=3),
        Layout("grid2.5d_pp2", tensor=8, mode="2.5d", depth=2, pipeline=2, microbatches=4),
        Layout("grid2.5d_dp2", tensor=8, mode="2.5d", depth=2, data=2),
        Layout("grid3d_pp2", tensor=8, mode="3d", pipeline=2, microbatches=4),
        Layout("grid3d_dp2_zero3", tensor=8, mode="3d", data=2, zero=3),
    ]
)


#: Models that are no chain: layers in lists, called by code of any kind.
FRAME_SUBJECTS: dict[str, Subject] = _named(
    [
        Subject("loop", frame_zoo.Loop),
        Subject("slices", frame_zoo.Slices),
        Subject("keyed", frame_zoo.Keyed),
        Subject("masked", frame_zoo.Masked),
        Subject("skips", frame_zoo.Skips),
        Subject("all_states", frame_zoo.AllStates),
        Subject("flow", frame_zoo.Flow),
        Subject("encoder_decoder", frame_zoo.EncoderDecoder),
        Subject("reentrant", frame_zoo.Reentrant),
        Subject("reentrant_frozen", frame_zoo.ReentrantWithoutGradients),
        Subject("siamese", frame_zoo.Siamese),
        Subject("compiled_loop", frame_zoo.CompiledLoop),
        Subject("compiled_parts", frame_zoo.CompiledParts),
        Subject("compiled_recomputed", frame_zoo.CompiledLoop, strategy={"recompute": True}),
        Subject("in_place_frame", frame_zoo.InPlaceFrame),
        Subject("stacks", frame_zoo.Stacks, {"num_microbatches": 3}, replicas="ddp", microbatched=True),
        Subject("classes", frame_zoo.Classes, replicas="ddp"),
        Subject("named", frame_zoo.Named),
        Subject("loop_accumulated", frame_zoo.Loop, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        Subject("loop_recomputed", frame_zoo.Slices, strategy={"recompute": True}),
        Subject("two_views", frame_zoo.TwoViews, strategy={"body": ["blocks"]}),
        Subject("views", frame_zoo.TwoViews),
        Subject("layer_by_layer", frame_zoo.LayerByLayer),
        Subject("projected", frame_zoo.Projected),
        Subject("penalised", frame_zoo.Penalised),
        Subject("averaged", frame_zoo.Averaged),
        Subject("momentum_teacher", frame_zoo.Momentum),
    ]
)

#: Draws random numbers around and in its layers: the same under every layout.
DRAWING_SUBJECTS: dict[str, Subject] = _named(
    Subject(name, module, {"num_microbatches": 4})
    for name, module in (
        ("frame_drops", frame_zoo.FrameDrops),
        ("gathered_drops", tensor_frame_zoo.GatheredDrops),
        ("shared_drops", tensor_frame_zoo.SharedDrops),
    )
)

#: Models of transformers. Where the loss is one of all samples together, the batch is one microbatch.
HF_SUBJECTS: dict[str, Subject] = _named(
    Subject(
        f"hf_{name}",
        module,
        {"num_microbatches": 1} if name in hf_zoo.COUPLED else {},
        replicas="ddp" if name in hf_zoo.COUPLED else "joined",
        in_float32=name in hf_zoo.IN_FLOAT32,
    )
    for name, module in hf_zoo.MODULES.items()
)

#: Models of transformers, and blocks of other libraries, whose layers are found; all in float64.
FOUND_SUBJECTS: dict[str, Subject] = _named(
    [
        *(
            Subject(f"found_{name}", hf_zoo.in_float64(hf_zoo.MODULES[name]))
            for name in ("llama", "mistral", "qwen2", "qwen3", "phi3", "bert", "vit", "t5", "bart", "opt", "gpt2")
        ),
        *(
            Subject(f"found_{name}", hf_zoo.MODULES[name])
            for name in ("distilbert", "roberta", "whisper", "deit", "beit_relative")
        ),
        Subject("found_timm", tensor_zoo.TimmViT),
        Subject("found_nano", tensor_zoo.NanoGPT),
    ]
)

#: One of them whose blocks are divided too, by names of styles.
HF_SHARED: dict[str, Subject] = _named(
    [
        replace(
            HF_SUBJECTS["hf_llama"],
            name="hf_llama_shared",
            strategy={
                "tensor_parallel_plan": {
                    "model.model.embed_tokens": "vocab",
                    "model.model.layers.*.self_attn.[qkv]_proj": "colwise",
                    "model.model.layers.*.self_attn.o_proj": "rowwise",
                    "model.model.layers.*.mlp.gate_proj": "colwise",
                    "model.model.layers.*.mlp.up_proj": "colwise",
                    "model.model.layers.*.mlp.down_proj": "rowwise",
                    "model.lm_head": "vocab",
                }
            },
        )
    ]
)

FRAME_LAYOUTS: dict[str, Layout] = _named(
    [
        Layout("frame_pp2", pipeline=2, microbatches=4),
        Layout("frame_pp3", pipeline=3, microbatches=5),
        Layout("frame_pp4", pipeline=4, partition="parameters"),
        Layout("frame_pp2_dp2", pipeline=2, data=2, microbatches=4, rank_order="dp-pp-tp"),
        Layout("frame_pp2_chunks2", pipeline=2, chunks=2, microbatches=4),
        Layout("frame_zero1", pipeline=2, data=2, microbatches=4, zero=1),
        Layout("frame_zero3", pipeline=2, data=2, microbatches=4, zero=3),
        Layout("frame_zero3_early", pipeline=2, data=2, microbatches=3, zero=3, reshards=True),
    ]
)


#: Statistics belong to a replica's microbatch; and replicas draw different numbers.
_MICROBATCHED: dict[str, Any] = {"strategy": {"num_microbatches": 2}, "replicas": "ddp", "microbatched": True}
_DRAWING: dict[str, Any] = _MICROBATCHED | {"layers_draw": True}

#: Public modules as their authors write them.
ZOO_SUBJECTS: dict[str, Subject] = _named(
    [
        Subject("nano_gpt", public_zoo.NanoGPT),
        Subject("transformer_lm", public_zoo.TransformerLM, trainer={"precision": "64-true"}),
        Subject("seq2seq", public_zoo.Seq2Seq, **_DRAWING),
        Subject("mixtral", public_zoo.Mixtral),
        Subject("deep_supervision", public_zoo.DeepSupervision),
        Subject("multi_task", public_zoo.MultiTask),
        Subject("timm_vit", public_zoo.ViT, **_DRAWING),
        Subject("swin", public_zoo.Swin, **_DRAWING),
        Subject("resnet18", public_zoo.ResNet18, **_MICROBATCHED),
        Subject("group_norm_resnet", public_zoo.GroupNormResNet),
        Subject("densenet", public_zoo.DenseNet, **_MICROBATCHED),
        Subject("unet", public_zoo.UNet, **_MICROBATCHED),
        Subject("vae", public_zoo.VAE, **_DRAWING),
        Subject("image_flow", public_zoo.ImageFlow, **_DRAWING),
        Subject("pixel_cnn", public_zoo.PixelCNN),
        Subject("mae", public_zoo.MAE, **_DRAWING),
        Subject("sim_siam", public_zoo.SimSiam, **_MICROBATCHED),
        Subject("sim_clr", public_zoo.SimCLR, strategy={"num_microbatches": 1}, replicas="ddp"),
        Subject("mean_teacher", public_zoo.MeanTeacher),
        Subject("buffer_teacher", public_zoo.BufferTeacher),
        Subject("byol", public_zoo.BYOL),
        Subject("lstm_lm", public_zoo.LSTMLM, trainer={"precision": "64-true"}),
        Subject("gru_seq2seq", public_zoo.GRUSeq2Seq),
        Subject("pairs_vit", public_zoo.PairsViT),
        Subject("named_unet", public_zoo.NamedUNet, **_MICROBATCHED),
        Subject("diffusion", public_zoo.Diffusion, **_DRAWING),
        Subject("wavenet", public_zoo.WaveNet),
        Subject("wavenet_named", public_zoo.WaveNet, strategy={"body": public_zoo.WAVENET_BODY}),
        Subject("shared_stem", public_zoo.SharedStem, **_MICROBATCHED),
        Subject("gin", public_zoo.GIN),
        Subject("dlrm", public_zoo.DLRM),
        Subject("kept_losses", public_zoo.KeptLosses),
        Subject(
            "sim_siam_named",
            public_zoo.SimSiam,
            strategy={"num_microbatches": 2, "body": ["backbone"]},
            replicas="ddp",
            microbatched=True,
        ),
        Subject(
            "lstm_named",
            public_zoo.LSTMLM,
            strategy={"body": ["model.encoder", "model.rnn", "model.decoder"]},
            trainer={"precision": "64-true"},
        ),
        Subject("gan", public_zoo.GAN),
    ]
)

ZOO_LAYOUTS: dict[str, Layout] = _named(
    [
        Layout("zoo_pp2", pipeline=2, microbatches=4),
        Layout("zoo_pp3", pipeline=3, microbatches=5),
        Layout("zoo_pp4", pipeline=4, partition="parameters"),
        Layout("zoo_pp2_dp2", pipeline=2, data=2, microbatches=4, rank_order="dp-pp-tp"),
        Layout("zoo_pp2_chunks2", pipeline=2, chunks=2, microbatches=4),
        Layout("zoo_zero3", pipeline=2, data=2, microbatches=4, zero=3),
        Layout("zoo_recomputed", pipeline=2, microbatches=4, recompute=True),
    ]
)

#: Layers that are shared by several ranks, in models that are no chain.
TENSOR_FRAME_SUBJECTS: dict[str, Subject] = _named(
    [
        Subject("listed_encoders", tensor_frame_zoo.ListedEncoders),
        Subject("listed_own", tensor_frame_zoo.ListedOwn),
        Subject("listed_words", tensor_frame_zoo.ListedWords, trainer={"gradient_clip_val": 0.1}),
        Subject("listed_tied", tensor_frame_zoo.ListedTied, trainer={"accumulate_grad_batches": 2}),
        Subject("weight_used", tensor_frame_zoo.WeightUsed),
        Subject("translation", tensor_frame_zoo.Translation),
        Subject("exits", tensor_frame_zoo.Exits),
        Subject("shared_around", tensor_frame_zoo.SharedAround),
        Subject("shared_units", tensor_frame_zoo.SharedUnits),
        Subject("shared_units_recomputed", tensor_frame_zoo.SharedUnits, strategy={"recompute": True}),
        Subject("shared_views", tensor_frame_zoo.TwoViews),
        Subject("clamped", tensor_frame_zoo.Clamped),
        Subject("words_recomputed", tensor_frame_zoo.ListedTied, strategy={"recompute": ["blocks.*", "head"]}),
    ]
)

TENSOR_FRAME_LAYOUTS: dict[str, Layout] = _named(
    [
        Layout("frame_tp2_pp2", tensor=2, pipeline=2, microbatches=4),
        Layout("frame_tp2_pp2_chunks2", tensor=2, pipeline=2, chunks=2, microbatches=4, rank_order="dp-pp-tp"),
        Layout("frame_tp2_pp2_sequence", tensor=2, pipeline=2, microbatches=3, sequence_parallel=True),
        Layout("frame_tp2_pp2_dp2", tensor=2, pipeline=2, data=2, microbatches=2, rank_order="tp-dp-pp"),
        Layout("frame_tp2_pp2_zero1", tensor=2, pipeline=2, data=2, microbatches=2, zero=1),
        Layout("frame_tp2_pp2_zero3", tensor=2, pipeline=2, data=2, microbatches=2, zero=3),
    ]
)


#: What replicas divide, under every kind of layout that has some.
ZERO_LAYOUTS: dict[str, Layout] = _named(
    replace(layout, name=f"{layout.name}_zero{stage}{'_early' * (reshards is True)}", zero=stage, reshards=reshards)
    for layout in [
        Layout("dp2", data=2),
        Layout("dp4", data=4),
        Layout("dp2_m3", data=2, microbatches=3),
        Layout("pp2_dp2", pipeline=2, data=2, microbatches=4, rank_order="dp-pp-tp"),
        Layout("pp2_dp2_chunks2", pipeline=2, data=2, chunks=2, microbatches=3, partition="parameters"),
        Layout("tp2_dp2", tensor=2, data=2, rank_order="tp-dp-pp"),
        Layout("tp2_dp2_sequence", tensor=2, data=2, sequence_parallel=True),
        Layout("tp2_pp2_dp2", tensor=2, pipeline=2, data=2, microbatches=4),
        Layout("dp4_of2", data=4, zero_size=2),
        Layout("pp2_dp4_of2", pipeline=2, data=4, microbatches=2, zero_size=2, rank_order="dp-pp-tp"),
        Layout("tp2_dp4_of2", tensor=2, data=4, zero_size=2),
    ]
    for stage, reshards in ((1, "auto"), (2, "auto"), (3, False), (3, True))
)


#: Modules with experts that replicas divide, and layouts with replicas that divide them.
EXPERT_SUBJECTS: dict[str, Subject] = _named(
    [
        Subject("sparse", expert_zoo.SparseLayers),
        Subject("sparse_accumulated", expert_zoo.SparseLayers, trainer={"accumulate_grad_batches": 2}),
        Subject("sparse_clipped", expert_zoo.FirstChoice, trainer={"gradient_clip_val": 0.1}),
        Subject("sparse_recomputed", expert_zoo.SparseLayers, strategy={"recompute": True}),
        Subject("one_sided", expert_zoo.OneSided),
        Subject("frozen_experts", expert_zoo.FrozenExperts),
        Subject("sparse_words", expert_zoo.SparseWords, trainer={"gradient_clip_val": 0.1}),
        Subject("sparse_around", expert_zoo.SparseAround),
    ]
)

EXPERT_LAYOUTS: dict[str, Layout] = _named(
    [
        Layout("ep2", data=2, experts=2),
        Layout("ep2_m3", data=2, microbatches=3, experts=2),
        Layout("ep4", data=4, experts=4),
        Layout("ep2_of4", data=4, experts=2),
        *(Layout(f"ep2_zero{stage}", data=2, experts=2, zero=stage) for stage in (1, 2, 3)),
        Layout("ep2_zero3_early", data=2, experts=2, zero=3, reshards=True),
        Layout("ep2_of4_zero1", data=4, experts=2, zero=1),
        Layout("ep2_of4_zero2", data=4, experts=2, zero=2),
        Layout("ep2_of4_zero3", data=4, experts=2, zero=3),
        Layout("ep2_of4_zero3_early", data=4, experts=2, zero=3, reshards=True),
        Layout("ep2_of4_cp2_zero2", data=4, context=2, experts=2, zero=2),
        Layout("ep2_of4_zero3_of2", data=4, experts=2, zero=3, zero_size=2),
        Layout("ep4_zero1_of2", data=4, experts=4, zero=1, zero_size=2),
        Layout("ep2_pp2", pipeline=2, data=2, microbatches=4, experts=2),
        Layout("ep2_pp2_outer", pipeline=2, data=2, microbatches=3, experts=2, rank_order="dp-pp-tp"),
        Layout("ep2_pp2_chunks2", pipeline=2, data=2, chunks=2, microbatches=4, experts=2),
        Layout("ep2_pp2_zero1", pipeline=2, data=2, microbatches=4, experts=2, zero=1),
        Layout("ep2_pp2_zero3", pipeline=2, data=2, microbatches=4, experts=2, zero=3),
        Layout("ep2_pp2_zero3_early", pipeline=2, data=2, microbatches=2, experts=2, zero=3, reshards=True),
        Layout("ep2_tp2", tensor=2, data=2, experts=2),
        Layout("ep2_tp2_zero2", tensor=2, data=2, experts=2, zero=2),
        Layout("ep2_cp2", context=2, data=2, experts=2),
        Layout("ep2_cp2_ring_zero1", context=2, context_kind="ring", data=2, experts=2, zero=1),
        Layout("ep2_pp2_tp2", pipeline=2, tensor=2, data=2, microbatches=2, experts=2),
        Layout("ep2_pp2_of4", pipeline=2, data=4, microbatches=2, experts=2),
        Layout("ep2_pp2_of4_zero3", pipeline=2, data=4, microbatches=2, experts=2, zero=3),
        Layout("ep2_tp2_of4_zero3_early", tensor=2, data=4, experts=2, zero=3, reshards=True),
        Layout("tensor_ep2", tensor=2, experts="tensor"),
        Layout("tensor_ep4_m3", tensor=4, microbatches=3, experts="tensor"),
        Layout("tensor_ep2_sequence", tensor=2, sequence_parallel=True, experts="tensor"),
        Layout("tensor_ep2_dp2", tensor=2, data=2, rank_order="tp-dp-pp", experts="tensor"),
        *(Layout(f"tensor_ep2_zero{stage}", tensor=2, data=2, zero=stage, experts="tensor") for stage in (1, 2, 3)),
        Layout("tensor_ep2_pp2", tensor=2, pipeline=2, microbatches=4, experts="tensor"),
        Layout("tensor_ep2_pp2_chunks2", tensor=2, pipeline=2, chunks=2, microbatches=4, experts="tensor"),
        Layout("tensor_ep2_cp2", tensor=2, context=2, experts="tensor"),
    ]
)


def _without_cache(name: str) -> type[zoo.Example]:
    """A model of transformers whose layers can run again."""
    module = hf_zoo.in_float64(hf_zoo.MODULES[name])
    return type(module.__name__, (module,), {"config": module.config | {"use_cache": False}})


#: Models of sequences, of which ranks have shares.
CONTEXT_SUBJECTS: dict[str, Subject] = _named(
    [
        Subject("context_example", context_zoo.ExampleGPT),
        Subject("context_uneven", context_zoo.Uneven, trainer={"accumulate_grad_batches": 2}),
        Subject("context_encoder", context_zoo.PaddedEncoder, trainer={"gradient_clip_val": 0.1}),
        Subject("context_first", context_zoo.SequenceFirst),
        Subject("context_decoder", context_zoo.Decoder),
        *(Subject(f"context_{name}", _without_cache(name)) for name in ("gpt2", "llama", "mistral")),
        Subject("context_used_twice", context_zoo.UsedTwice),
        Subject("context_penalised", context_zoo.Penalised),
    ]
)

#: Some of them for more ranks.
WIDE_CONTEXT_SUBJECTS: dict[str, Subject] = _named(
    [
        Subject("context_wide_example", context_zoo.WideGPT),
        Subject("context_wide_encoder", context_zoo.WideEncoder, trainer={"gradient_clip_val": 0.1}),
    ]
)

CONTEXT_LAYOUTS: dict[str, Layout] = _named(
    replace(layout, name=f"{layout.name}_{kind}", context_kind=kind)
    for kind in KINDS
    for layout in [
        Layout("cp2", context=2),
        Layout("cp4", context=4),
        Layout("cp2_tp2", context=2, tensor=2),
        Layout("cp2_pp2", context=2, pipeline=2, microbatches=4),
        Layout("cp2_pp2_chunks2", context=2, pipeline=2, chunks=2, microbatches=4, rank_order="cp-dp-pp-tp"),
        Layout("cp2_dp2", context=2, data=2, rank_order="cp-pp-dp-tp"),
        Layout("cp2_zero2", context=2, data=2, zero=2),
        Layout("cp2_zero3", context=2, data=2, zero=3),
        Layout("cp2_recompute", context=2, recompute=True),
        *([Layout("cp2_selective", context=2, recompute="selective")] if kind == "ulysses" else []),
        Layout("cp2_pp2_recompute", context=2, pipeline=2, microbatches=4, recompute=True),
        Layout("cp2_tp2_pp2", context=2, tensor=2, pipeline=2, microbatches=4),
    ]
)

#: Shares whose neighbours are not all there are, beside each of the other axes.
WIDE_CONTEXT_LAYOUTS: dict[str, Layout] = _named(
    replace(layout, name=f"{layout.name}_{kind}", context_kind=kind)
    for kind in KINDS
    for layout in [
        Layout("cp4_recompute", context=4, recompute=True),
        Layout("cp4_tp2", context=4, tensor=2),
        Layout("cp4_pp2", context=4, pipeline=2, microbatches=4),
        Layout("cp4_dp2", context=4, data=2, rank_order="cp-pp-dp-tp"),
        Layout("cp4_zero2", context=4, data=2, zero=2),
    ]
)


#: Convolutions have nothing that tensor-parallel ranks could share: each rank has these whole.
UNSHARED = {"resnet"}


def _together(*lists: dict[str, Any]) -> dict[str, Any]:
    """All that is in these lists: a name that two of them had would silently mean the one of the last."""
    together: dict[str, Any] = {}
    for named in lists:
        twice = together.keys() & named.keys()
        assert not twice, f"names in two lists: {sorted(twice)}"
        together |= named
    return together


_SUBJECTS: dict[str, Subject] = _together(
    SUBJECTS,
    TENSOR_SUBJECTS,
    FRAME_SUBJECTS,
    TENSOR_FRAME_SUBJECTS,
    EXPERT_SUBJECTS,
    DRAWING_SUBJECTS,
    HF_SUBJECTS,
    HF_SHARED,
    FOUND_SUBJECTS,
    ZOO_SUBJECTS,
    CONTEXT_SUBJECTS,
    WIDE_CONTEXT_SUBJECTS,
)
_LAYOUTS: dict[str, Layout] = _together(
    LAYOUTS,
    ZERO_LAYOUTS,
    EXPERT_LAYOUTS,
    TENSOR_LAYOUTS,
    GRID_LAYOUTS,
    FRAME_LAYOUTS,
    TENSOR_FRAME_LAYOUTS,
    ZOO_LAYOUTS,
    CONTEXT_LAYOUTS,
    WIDE_CONTEXT_LAYOUTS,
)


def subject_of(name: str) -> Subject:
    """The subject of this name."""
    return _SUBJECTS[name]


def layout_of(name: str) -> Layout:
    """The layout of this name."""
    return _LAYOUTS[name]


def allowed(subject: str, layout: str, schedule: str) -> bool:
    """Whether a combination means anything: 1f1b has one chunk a rank."""
    return schedule != "1f1b" or layout_of(layout).chunks == 1


def pairs(triple: tuple[str, str, str]) -> set[tuple[int, int, str, str]]:
    """The pairs of a (subject, layout, schedule)."""
    return {(i, j, triple[i], triple[j]) for i, j in ((0, 1), (0, 2), (1, 2))}


def cover(
    subjects: Iterable[str],
    layouts: Iterable[str],
    schedules: Iterable[str],
    possible: Callable[[str, str, str], bool] = allowed,
) -> list[tuple[str, str, str]]:
    """A short list of combinations in which every possible pair occurs (a covering array of strength two, greedily).

    The next combination is the one with the most pairs that have not occurred; of equals the one whose layout has met
    its schedule least often, so that what a pair cannot say (all three together) is spread too.
    """
    left = [triple for triple in itertools.product(subjects, layouts, schedules) if possible(*triple)]
    missing = set().union(*map(pairs, left))
    met: dict[tuple[str, str], int] = {}
    chosen = []
    while missing:
        best = max(left, key=lambda triple: (len(pairs(triple) & missing), -met.get(triple[1:], 0)))
        left.remove(best)
        missing -= pairs(best)
        met[best[1:]] = met.get(best[1:], 0) + 1
        chosen.append(best)
    return chosen


# -- running -----------------------------------------------------------------------------------------------------------


@dataclass
class Record:
    """What one rank saw of a training.

    Attributes:
        data_rank: Its replica.
        outputs: What `training_step` returned, by batch, as callbacks get it.
        shares: What each batch weighs against those of the other replicas.
        validation: What `validation_step` returned, by batch.
        steps: `callback_metrics` after each batch.
        metrics: `callback_metrics` at the end.
        norms: The norm of the gradients before each optimizer step (and before clipping).
        rates: The learning rates of all groups at each optimizer step.
        parameters: Those that this rank holds, by name.
        buffers: Likewise.
        names: Of all parameters and buffers, wherever they are.
        shared: How many parameters this rank has a part of that other tensor-parallel ranks do not have.
    """

    data_rank: int
    outputs: list[Any] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    validation: list[Any] = field(default_factory=list)
    steps: list[dict[str, Tensor]] = field(default_factory=list)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    norms: list[Tensor] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    shared: int = 0


class Recorder(Callback):
    def __init__(self) -> None:
        self.record = Record(data_rank=0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.record.outputs.append(_copy(outputs))
        weigh = getattr(pl_module, "microbatch_weight", None)
        self.record.shares.append(float(weigh(batch)) if weigh else 1.0)
        self.record.steps.append(_copy(dict(trainer.callback_metrics)))

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.record.validation.append(_copy(outputs))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if isinstance(trainer.strategy, HybridStrategy):
            norm = trainer.strategy.grad_norm()
        else:
            gradients = [p.grad.flatten().double() for p in pl_module.parameters() if p.grad is not None]
            norm = torch.linalg.vector_norm(torch.cat(gradients))
        self.record.norms.append(_copy(norm))
        self.record.rates.append([group["lr"] for group in optimizer.param_groups])

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        record = self.record
        record.data_rank = getattr(trainer.strategy, "distributed_sampler_kwargs", {"rank": 0})["rank"]
        record.metrics = _copy(dict(trainer.callback_metrics))
        parameters = dict(pl_module.named_parameters(remove_duplicate=False))
        buffers = dict(pl_module.named_buffers(remove_duplicate=False))
        record.names = [*parameters, *buffers]
        record.shared = sum(map(is_tensor_parallel, parameters.values()))
        record.parameters = {
            name: _copy(full_tensor(tensor)) for name, tensor in parameters.items() if not tensor.is_meta
        }
        record.buffers = {name: _copy(tensor) for name, tensor in buffers.items() if not tensor.is_meta}


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(entry) for key, entry in value.items()}
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def train(jobs: Sequence[Case | OracleKey]) -> list[Record]:
    """Train one after another; to be run on all ranks."""
    return [_hybrid(job) if isinstance(job, Case) else _oracle(job) for job in jobs]


def arguments_of(layout: Layout) -> dict[str, Any]:
    """The arguments of a strategy that a layout names."""
    return {
        "pipeline_parallel_size": layout.pipeline,
        "tensor_parallel_size": layout.tensor,
        "tensor_parallel_mode": layout.mode,
        "tensor_parallel_depth": layout.depth,
        "sequence_parallel": layout.sequence_parallel,
        "data_parallel_size": layout.data,
        "num_chunks": layout.chunks,
        "num_microbatches": layout.microbatches,
        "launch": Launch(rank_order=layout.rank_order),
        "partition": layout.partition,
        "zero_stage": layout.zero,
        "zero_size": layout.zero_size,
        "expert_parallel_size": 1 if layout.experts == "tensor" else layout.experts,
        "expert_parallel": "tensor" if layout.experts == "tensor" else "data",
        "tuning": Tuning(reshard_after_forward=layout.reshards),
        "recompute": layout.recompute,
        "context_parallel_size": layout.context,
        "context_parallel": layout.context_kind,
    }


def strategy_of(case: Case) -> HybridStrategy:
    """The strategy of a case."""
    # The module stays divided after the run: a record says what each rank holds.
    arguments = arguments_of(layout_of(case.layout)) | {"schedule": case.schedule, "gather_module_on_teardown": False}
    return HybridStrategy(**arguments | subject_of(case.subject).strategy)


def _hybrid(case: Case) -> Record:
    subject, layout = subject_of(case.subject), layout_of(case.layout)
    return _fit(subject, subject.module, strategy_of(case), layout.size, layout.data, case)


def _oracle(key: OracleKey) -> Record:
    subject = subject_of(key.subject)
    cls = subject.module
    if key.microbatches is not None:
        cls = accumulating(cls, key)
    if key.size > 1:
        cls = dealing(cls)
        return _fit(subject, cls, DDPStrategy(find_unused_parameters=True), key.size, key.data, key)
    return _fit(subject, cls, "auto", 1, key.data, key)


def _fit(
    subject: Subject, cls: type[zoo.Example], strategy: Any, ranks: int, replicas: int, job: Case | OracleKey
) -> Record:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if job.accelerator != "cpu":  # where torch computes a whole encoder layer in evaluations, the last digits are lost
        torch.backends.mha.set_fastpath_enabled(False)
    torch.manual_seed(SEED)
    module = cls(batch_size=cls.batch_per_step * (replicas if strategy == "auto" else 1))
    if job.double:
        module.double()
    batches = math.ceil(cls.samples / replicas / cls.batch_per_step)
    steps = math.ceil(batches / subject.trainer.get("accumulate_grad_batches", 1))
    recorder = Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator=job.accelerator,
            **devices_of(job.accelerator, ranks),
            strategy=strategy,
            max_epochs=math.ceil(MIN_STEPS / steps),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            callbacks=[recorder],
            **subject.trainer,
        )
        trainer.fit(module)
    return recorder.record


# -- oracles ---------------------------------------------------------------------------------------------------------


def dealing(cls: type[zoo.Example]) -> type[zoo.Example]:
    """A module that divides its data over replicas in the order of one process: left to itself, Lightning shuffles."""

    class Dealing(cls):
        def _loader(self, count: int, seed: int) -> DataLoader:
            loader = super()._loader(count, seed)
            sampler = DistributedSampler(loader.dataset, shuffle=False)
            return DataLoader(loader.dataset, loader.batch_size, sampler=sampler, collate_fn=loader.collate_fn)

    return Dealing


def accumulating(cls: type[zoo.Example], key: OracleKey) -> type[zoo.Example]:
    """A module whose step adds up the losses of microbatches; it draws the random numbers that the strategy draws.

    Args:
        cls: The module's class; its batches are tuples of tensors, it returns a loss, and logs means.
        key: What the numbers depend on; the sizes of microbatches differ by at most one.
    """
    microbatches = key.microbatches
    assert microbatches is not None

    class Accumulating(cls):
        _step = -1
        _evaluated = -1

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self._step += 1
            parts = list(zip(*(entry.tensor_split(microbatches) for entry in batch), strict=True))
            total, logs = 0.0, {}
            with isolated():
                for number, part in enumerate(parts):
                    share = len(part[0]) / len(batch[0])

                    def log(name: str, value: Any, share: float = share, **kwargs: Any) -> None:
                        before = logs.get(name, (0.0, None))[0]
                        logs[name] = before + share * value.detach(), kwargs

                    vars(self)["log"] = log
                    with _streams(self, key, SEED, self.global_rank, 0, self._step, number):
                        total = total + share * super().training_step(part, batch_idx)
                    del vars(self)["log"]
            for name, (value, kwargs) in logs.items():
                self.log(name, value, **kwargs)
            return total

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self._evaluated += 1
            with isolated(), _streams(self, key, SEED, self.global_rank, 1, self._evaluated):
                return super().validation_step(batch, batch_idx)

    return Accumulating


def _streams(module: nn.Module, key: OracleKey, *coordinates: int) -> AbstractContextManager[None]:
    """The random numbers of a step, of the code around the layers and of the layers."""
    seed_generators(derive_seed(*coordinates))
    if key.layers:
        return call_streams([module.get_submodule(name) for name in key.layers], coordinates)
    name = find_body(module, None, len(key.stages)).name if key.stages else ""
    return layer_streams(cast(nn.Sequential, module.get_submodule(name)), key.stages or (), coordinates)


@contextmanager
def isolated() -> Iterator[None]:
    """The random numbers outside are not changed by what is drawn inside."""
    saved = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(saved[0])
    np.random.set_state(saved[1])
    random.setstate(saved[2])


@contextmanager
def layer_streams(body: nn.Sequential, stages: Sequence[range], coordinates: tuple[int, ...]) -> Iterator[None]:
    """The layers of each stage draw from a stream of their own."""
    outside: list[Tensor] = []

    def enter(stage: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            outside.append(torch.get_rng_state())
            seed_generators(derive_seed(*coordinates, -1, stage))

        return hook

    def leave(*_: Any) -> None:
        torch.set_rng_state(outside.pop())

    handles = []
    if len(stages) > 1:
        for stage, layers in enumerate(stages):
            handles.append(body[layers[0]].register_forward_pre_hook(enter(stage)))
            handles.append(body[layers[-1]].register_forward_hook(leave))
    yield
    for handle in handles:
        handle.remove()


class _Calls(TorchFunctionMode):
    """Numbers the calls of torch functions, and gives each a stream of its own."""

    def __init__(self, coordinates: tuple[int, ...]) -> None:
        super().__init__()
        self.coordinates = coordinates
        self.number = 0

    def next(self) -> None:
        torch.default_generator.manual_seed(derive_seed(*self.coordinates, -2, self.number))
        self.number += 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in METADATA:
            self.next()
        return func(*args, **(kwargs or {}))


@contextmanager
def call_streams(units: Sequence[nn.Module], coordinates: tuple[int, ...]) -> Iterator[None]:
    """Each call around the units draws from a stream of its own, and so does each call of a unit."""
    calls = _Calls(coordinates)

    def redirected(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.next()
            with torch._C.DisableTorchFunction():
                return forward(*args, **kwargs)

        return run

    for unit in units:
        vars(unit)["forward"] = redirected(unit.forward)
    with calls:
        yield
    for unit in units:
        del vars(unit)["forward"]


def oracle_of(case: Case) -> OracleKey:
    """The oracle of a case."""
    subject, layout = subject_of(case.subject), layout_of(case.layout)
    if not subject.microbatched:
        return OracleKey(case.subject, layout.data, case.double, accelerator=case.accelerator)
    microbatches = subject.strategy["num_microbatches"]
    key = OracleKey(case.subject, layout.data, case.double, microbatches, accelerator=case.accelerator)
    if not subject.layers_draw or layout.pipeline == 1:  # a single rank has one stage, whatever its chunks
        return key
    body = find_body(subject.module(), subject.strategy.get("body"), layout.pipeline * layout.chunks)
    if body.chain is None:
        return replace(key, layers=body.names)
    return replace(key, stages=find_stages(subject.module(), strategy_of(case).settings, layout.pipeline)[1].stages)


# -- comparing ---------------------------------------------------------------------------------------------------------


class Comparison:
    """Collects differences between two sets of numbers.

    Args:
        tolerance: The largest relative difference; of a tensor, relative to its largest entry.
    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.differences: list[str] = []
        self.compared = 0

    def __call__(self, what: str, got: Any, expected: Any) -> None:
        self.compared += 1
        if isinstance(expected, dict) and isinstance(got, dict):
            if got.keys() != expected.keys():
                self.differences.append(f"{what}: keys {sorted(got)}, expected {sorted(expected)}")
            for key in got.keys() & expected.keys():
                self(f"{what}[{key!r}]", got[key], expected[key])
        elif isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)):
            if len(got) != len(expected):
                self.differences.append(f"{what}: {len(got)} entries, expected {len(expected)}")
            for index, (a, b) in enumerate(zip(got, expected, strict=False)):
                self(f"{what}[{index}]", a, b)
        elif isinstance(expected, Tensor) and isinstance(got, Tensor):
            self._tensors(what, got, expected)
        elif type(got) is not type(expected) or got != expected:
            self.differences.append(f"{what}: {got!r}, expected {expected!r}")

    def _tensors(self, what: str, got: Tensor, expected: Tensor) -> None:
        if got.shape != expected.shape or got.dtype != expected.dtype:
            kinds = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (got, expected)]
            self.differences.append(f"{what}: {kinds[0]}, expected {kinds[1]}")
            return
        if expected.numel() == 0:
            return
        got, expected = got.double(), expected.double()
        error = (got - expected).abs().max().item()
        scale = max(expected.abs().max().item(), 1e-3)
        if not error <= self.tolerance * scale:
            text = f"{got.item()!r}, expected {expected.item()!r}, " if expected.numel() == 1 else ""
            self.differences.append(f"{what}: {text}relative difference {error / scale:.1e}")


def compare(case: Case, records: Sequence[Record], oracle: Sequence[Record]) -> list[str]:
    """The differences between what the ranks of a case saw and what the oracle's processes saw."""
    comparison = Comparison(1e-10 if case.double and not subject_of(case.subject).in_float32 else 1e-5)
    exact = Comparison(0.0)
    layout = layout_of(case.layout)
    replicas = [[r for r in records if r.data_rank == data_rank] for data_rank in range(layout.data)]
    assert [len(group) for group in replicas] == [layout.size // layout.data] * layout.data
    joined = len(oracle) < layout.data
    for data_rank, group in enumerate(replicas):
        expected = oracle[0 if joined else data_rank]
        assert len(expected.norms) >= MIN_STEPS
        for rank, record in enumerate(group):
            where = f"data rank {data_rank}, rank {rank} of its model group"
            for name in ("outputs", "validation", "steps", "metrics", "norms", "rates"):
                exact(f"{where}, {name} against the first rank", getattr(record, name), getattr(group[0], name))
            for name in ("steps", "metrics", "norms", "rates"):
                comparison(f"{where}, {name}", getattr(record, name), getattr(expected, name))
            if not joined:
                comparison(f"{where}, outputs", record.outputs, expected.outputs)
                comparison(f"{where}, validation", record.validation, expected.validation)
        # What follows the body runs on the last stage only, so the last one of several holders has a buffer right.
        buffers = {name: value for record in group for name, value in record.buffers.items()}
        comparison(f"data rank {data_rank}, buffers", buffers, expected.buffers)
    if joined:
        firsts = [group[0] for group in replicas]
        together = [_join(values, shares) for values, shares in _batches(firsts, "outputs")]
        comparison("outputs of all replicas", together, oracle[0].outputs)
        together = [_join(values, shares) for values, shares in _batches(firsts, "validation")]
        comparison("validation of all replicas", together, oracle[0].validation)
    _compare_holders(exact, comparison, records, replicas, oracle[0])
    if layout.pipeline > 1:
        whole = len(oracle[0].parameters)
        exact("ranks with the whole model", sum(len(record.parameters) == whole for record in records), 0)
    if layout.tensor > 1:  # else a case of replicas would pass, and prove nothing
        without = sum(not record.shared for record in records)
        exact("ranks without shared parameters", without, layout.size if case.subject in UNSHARED else 0)
    return exact.differences + comparison.differences


def _compare_holders(
    exact: Comparison,
    comparison: Comparison,
    records: Sequence[Record],
    replicas: Sequence[Sequence[Record]],
    oracle: Record,
) -> None:
    """Every holder of a parameter has the same bits, and all of the model is somewhere in each replica."""
    first: dict[str, Tensor] = {}
    for rank, record in enumerate(records):
        exact(f"names on rank {rank}", record.names, oracle.names)
        for name, value in record.parameters.items():
            exact(f"{name} on rank {rank}, against its first holder", value, first.setdefault(name, value))
    comparison("weights", first, oracle.parameters)
    for group in replicas:
        exact("union of parameters", set().union(*(r.parameters for r in group)), set(oracle.parameters))
        exact("union of buffers", set().union(*(r.buffers for r in group)), set(oracle.buffers))


def _batches(records: Sequence[Record], name: str) -> Iterator[tuple[list[Any], list[float]]]:
    for index in range(max(len(getattr(record, name)) for record in records)):
        shares = [record.shares[index] if name == "outputs" else 1.0 for record in records]
        yield [getattr(record, name)[index] for record in records], shares


def _join(values: list[Any], shares: list[float]) -> Any:
    """What replicas returned, as one process returns it that gets the samples of all of them in turns."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _join([value[key] for value in values], shares) for key in first}
    if not isinstance(first, Tensor):
        return first
    if first.ndim > 0:
        return torch.stack(values, 1).flatten(0, 1)
    return sum(value * share for value, share in zip(values, shares, strict=True)) / sum(shares)
