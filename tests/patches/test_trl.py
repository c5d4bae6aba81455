"""TRL's packed rows under "ffpa": losses and gradients of "eager" on the documents apart. Slow: TRL brings 250 MB."""

from __future__ import annotations

import warnings

import pytest
import tiny_transformers as tiny
import torch
from torch.nn import functional as F

import ffpa_hf

pytestmark = pytest.mark.slow

WORDS = "the quick brown fox jumps over a lazy dog and then it rests for a while in the sun".split()


def trainer(family, implementation, packing, tmp_path, lora=False, **options):
    """An SFTTrainer on a tiny model; what is missing here must fail, not skip: `make test-slow` installs TRL."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import ByT5Tokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = ByT5Tokenizer(extra_ids=0)
    more = {"vocab_size_per_layer_input": len(tokenizer)} if family.startswith("gemma4") else {}
    model = tiny.model(family, implementation, vocab_size=len(tokenizer), **more)
    texts = [" ".join(WORDS[start : start + 3 + start % 5]) for start in range(12)]
    packed = {"packing": True, "packing_strategy": "bfd", "max_length": 96}
    if packing == "padding_free":
        packed = {"padding_free": True, "max_length": None}
    torch.manual_seed(1)  # of the adapter
    made = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        peft_config=LoraConfig(target_modules=["q_proj", "k_proj", "o_proj"], r=4) if lora else None,
        train_dataset=Dataset.from_dict({"text": texts}),
        args=SFTConfig(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=3,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            **{"gradient_checkpointing": False, **packed, **options},
        ),
    )
    made.model.config.output_router_logits = made.aux_loss_enabled = False  # a loss of experts, not of tokens
    return made


def gradient(model):
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    return torch.cat([torch.zeros(0) if grad is None else grad.double().flatten() for grad in grads])


def apart(model, batch):
    """The loss of each document of a packed row alone, weighed by its labels."""
    tokens, positions = batch["input_ids"], batch["position_ids"][0]
    starts = [*(positions == 0).nonzero().flatten().tolist(), positions.numel()]
    assert len(starts) > 3  # several documents, or nothing is tested
    total = count = 0
    for begin, end in zip(starts, starts[1:], strict=False):
        document = tokens[:, begin:end]
        logits = model(document, use_cache=False).logits[0, :-1]
        total = total + F.cross_entropy(logits, document[0, 1:], reduction="sum")
        count += end - begin - 1
    return total / count


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("packing", ["bfd", "padding_free"])
@pytest.mark.parametrize("family", ["llama", "gemma4", "gemma4_shared", "gpt_oss"])
def test_a_packed_batch_is_its_documents_apart(family, packing, checkpointing, lora, tmp_path):
    more = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    made = trainer(family, "ffpa", packing, tmp_path, lora, **(more if checkpointing else {}))
    batch = next(iter(made.get_train_dataloader()))
    assert "cu_seq_lens_q" in batch and "attention_mask" not in batch
    model = made.model.train()
    if checkpointing:  # which the trainer turns on when it starts
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    loss = made.compute_loss(model, dict(batch))
    loss.backward()
    eager = trainer(family, "eager", packing, tmp_path, lora).model.train()
    wanted = apart(eager, batch)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=2e-5)
    truth = gradient(eager)
    assert truth.norm() > 0
    assert ((gradient(model) - truth).norm() / truth.norm()).item() < 5e-5


@pytest.mark.parametrize("packing", ["bfd", "padding_free"])
@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_training_follows_eager_without_complaint(family, packing, tmp_path):
    def curve(implementation):
        made = trainer(family, implementation, packing, tmp_path)
        made.train()
        return [entry["loss"] for entry in made.state.log_history if "loss" in entry], made.model

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours, model = curve("ffpa")
    assert not [str(warning.message) for warning in said if "attn_implementation" in str(warning.message)]
    theirs, _ = curve("eager")
    assert ours == pytest.approx(theirs, rel=2e-3) and len(ours) == 3
    assert sum(ffpa_hf.report(model).backends().values()) == 2 * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 on CPU tensors is the interpreter's")
def test_its_selective_checkpointing_saves_what_our_kernels_gave(forced, monkeypatch):
    from trl.models import enable_selective_activation_checkpointing

    import ffpa_hf.kernels.triton as backend

    calls = []
    real = backend.forward
    monkeypatch.setattr(backend, "forward", lambda *given: calls.append(1) or real(*given))
    model = ffpa_hf.enable(tiny.model("gemma4").train(), backend="triton")
    enable_selective_activation_checkpointing(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    tokens = torch.randint(2, tiny.VOCAB, (1, 9))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert len(calls) == model.config.num_hidden_layers  # recomputed, it would be twice as many
