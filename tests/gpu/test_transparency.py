"""The main proof on a GPU, over NCCL: the numbers of one process on the same GPU, in float64."""

from __future__ import annotations

import pytest
import torch

from tests import results as trainings
from tests.results import Results, listed
from tests.transparency import Case, compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

#: Trainings in one call of the ranks: where a GPU is lent for a short time, what has been found by then shall be seen.
BATCH = 6

#: Each subject once; between them every kind of layout, and of code in a step.
PAIRS = [
    *(("momentum", "m3"), ("residual", "pp2"), ("tied", "pp2"), ("around", "pp2_chunks3"), ("ragged", "pp2")),
    *(("token_weighted", "pp2_dp2"), ("shared_parameter", "pp2"), ("dict_activations", "pp2"), ("few", "pp2")),
    *(("varying_length", "pp2"), ("classifier", "pp2"), ("outputs", "pp2"), ("unused", "dp2"), ("in_place", "pp2")),
    *(("clipped_by_norm", "pp2"), ("accumulated", "pp2_dp2"), ("dataclass_batch", "pp2"), ("plateau", "pp2")),
    *(("gpt", "tp2"), ("tied_words", "tp2_dp2"), ("encoders", "tp2_pp2"), ("mlps", "tp2_sequence")),
    *(("own_attention", "tp2_pp2_sequence"), ("tied_words", "grid2d"), ("decoders", "grid2d_recompute")),
    *(("loop", "dp2_zero1"), ("skips", "dp2_m3_zero2"), ("masked", "frame_zero3"), ("flow", "frame_pp2")),
    *(("encoder_decoder", "frame_pp2"), ("siamese", "frame_pp2_chunks2"), ("loop_recomputed", "frame_pp2")),
    *(("hf_gpt2", "frame_pp2"), ("hf_llama", "frame_pp2"), ("hf_t5", "frame_pp2"), ("found_mistral", "tp2")),
    *(("found_bert", "tp2_pp2"), ("context_example", "cp2_ring"), ("context_encoder", "cp2_ulysses")),
    *(("context_llama", "cp2_pp2_recompute_ring"), ("context_gpt2", "cp2_all_gather")),
    *(("context_mistral", "cp2_ulysses"), ("translation", "frame_tp2_pp2")),
]
CASES = [
    Case(subject, layout, "interleaved_1f1b" if "chunks" in layout else "1f1b", accelerator="gpu")
    for subject, layout in PAIRS
]
CASES.sort(key=lambda case: case.size)


@pytest.fixture(autouse=True)
def _few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "BATCH", BATCH)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"ranks{case.size}-{case}")
def test_double_precision(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, listed(differences)
