"""Fine-tuning loops under "ffpa": the losses of "eager" on documents apart, however they were batched."""

from __future__ import annotations

import functools

import pytest
import tiny_transformers as tiny
import torch
from torch.nn import functional as F
from transformers import DataCollatorWithFlattening

import ffpa_hf

accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

SIZES = (7, 4, 9)


@functools.cache
def documents():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, tiny.VOCAB, (size,), generator=generator).tolist() for size in SIZES]


def flattened():
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return dict(collate([{"input_ids": document} for document in documents()]))


def padded():
    longest = max(SIZES)
    tokens = torch.zeros(len(SIZES), longest, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, document in enumerate(documents()):
        tokens[row, : len(document)] = torch.tensor(document)
        mask[row, : len(document)] = 1
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def loss_of(model, batch):
    return model(**batch, use_cache=False).loss


def loss_apart(model):
    total = count = 0
    for document in documents():
        tokens = torch.tensor([document])
        logits = model(tokens, use_cache=False).logits[0, :-1]
        total = total + F.cross_entropy(logits, tokens[0, 1:], reduction="sum")
        count += len(document) - 1
    return total / count


def prepare(family, implementation, lora, checkpointing):
    model = tiny.model(family, implementation)
    if lora:
        torch.manual_seed(4)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "k_proj", "o_proj"], r=4))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def curve(model, loss_function, steps=4, precision="no", rate=0.2):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # one process, several precisions
    runner = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimiser = runner.prepare(model, torch.optim.SGD(parameters, rate))
    losses = []
    for _ in range(steps):
        loss = loss_function(model)
        runner.backward(loss)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


@functools.cache
def wanted(family, lora):
    return curve(prepare(family, "eager", lora, False), loss_apart)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("make_batch", [padded, flattened])
@pytest.mark.parametrize("family", ["llama", "gemma4", "gemma4_shared"])
def test_losses_are_those_of_documents_apart(family, make_batch, checkpointing, lora):
    model = prepare(family, "ffpa", lora, checkpointing)
    losses = curve(model, lambda m: loss_of(m, make_batch()))
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(wanted(family, lora), rel=2e-4)


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_mixed_precision_follows_eager_in_float32(family):
    # a small rate: with scores as large as Gemma 4's, half-precision runs of any implementation soon part ways
    exact = curve(prepare(family, "eager", False, False), loss_apart, rate=0.02)
    losses = curve(
        prepare(family, "ffpa", False, False), lambda m: loss_of(m, flattened()), precision="bf16", rate=0.02
    )
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(exact, rel=0.01)


def test_a_route_stays_with_the_model_through_accelerate_and_lora():
    model = prepare("gemma4", "eager", True, False)
    ffpa_hf.enable(model, backend="sdpa")
    losses = curve(model, lambda m: loss_of(m, flattened()))
    assert losses == pytest.approx(wanted("gemma4", True), rel=2e-4)
    assert ffpa_hf.report(model).backends() == {"sdpa": 8}  # two layers, four steps
    ffpa_hf.disable(model)
    assert model.config._attn_implementation == "eager"
