"""Tiny random models of every diffusers class that computes attention, for the sweep (`sweep.py` beside this folder).

A case is a function that returns a configuration (or a model) and the arguments of one forward; the decorator says
which class it belongs to and which configuration people run. Knows nothing of ffpa_hf.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

Built = tuple[Any, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One model class in one configuration.

    where: "" for `diffusers` itself, else the module that has the class. variant: what sets this configuration of a
    class apart from its others. published: constructor arguments of a released model where they are not the defaults;
    None where the class has no size of its own. slow: seconds per forward; left to `make test-slow`.
    head_dims: of modules that do not say theirs. gain: factor on the weights of linear layers, where attention would
    hardly show in the output. flex: runs flex attention, around which no dispatch mode may stand.
    """

    class_name: str
    build: Callable[[], Built]
    where: str
    variant: str
    published: dict[str, Any] | None
    slow: bool
    head_dims: tuple[int, ...]
    gain: float
    flex: bool

    @property
    def name(self) -> str:
        return f"{self.class_name}-{self.variant}" if self.variant else self.class_name

    @property
    def model_class(self) -> Any:
        return getattr(importlib.import_module(self.where) if self.where else diffusers, self.class_name)

    def make(self) -> tuple[nn.Module, dict[str, Any]]:
        """The model in eval mode and its inputs, the same on every call."""
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)  # what a constructor leaves uninitialised is NaN, not luck
        try:
            model, inputs = self.build()
            if isinstance(model, dict):
                torch.manual_seed(0)
                model = self.model_class(**model)
        finally:
            torch.use_deterministic_algorithms(False)
        awaken(model)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.data.mul_(self.gain)
        return model.eval(), inputs


CASES: dict[str, Case] = {}


def case(
    class_name: str,
    where: str = "",
    variant: str = "",
    published: dict[str, Any] | None = None,
    slow: bool = False,
    head_dims: tuple[int, ...] = (),
    gain: float = 1.0,
    flex: bool = False,
) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Enter a builder under its class."""

    def enter(build: Callable[[], Built]) -> Callable[[], Built]:
        made = Case(class_name, build, where, variant, published, slow, head_dims, gain, flex)
        assert made.name not in CASES, made.name
        CASES[made.name] = made
        return build

    return enter


def awaken(model: nn.Module) -> nn.Module:
    """Give weights that start at zero, or at nothing, a value: an attention behind them must be able to matter."""
    for parameter in model.parameters():
        if not torch.isfinite(parameter).all() or parameter.abs().max() == 0:
            nn.init.normal_(parameter, std=0.1)
        elif parameter.abs().max() < 1e-2:  # layer scales such as 1e-5
            nn.init.constant_(parameter, 0.5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_var is not None
            nn.init.ones_(module.running_var)
    return model


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape)


def kept(*lengths: int, of: int, dtype: torch.dtype = torch.bool) -> Tensor:
    """A mask `[len(lengths), of]`: that many first tokens of each row are real."""
    return (torch.arange(of) < torch.tensor(lengths)[:, None]).to(dtype)


def times(*values: float) -> Tensor:
    return torch.tensor(values)


def text_ids(length: int, axes: int = 3) -> Tensor:
    return torch.zeros(length, axes)


def grid_ids(height: int, width: int, axes: int = 3) -> Tensor:
    """Row and column of every image token, in the last two axes."""
    ids = torch.zeros(height, width, axes)
    ids[..., -2] += torch.arange(height)[:, None]
    ids[..., -1] += torch.arange(width)
    return ids.reshape(height * width, axes)


def rotary(length: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[length, width]` of some rotation."""
    angle = torch.outer(torch.arange(length).float(), torch.linspace(1.0, 0.1, width))
    return angle.cos(), angle.sin()


from sweep_models import audio, autoencoders, controlnets, image, other, unets, video  # noqa: E402, F401

_NO_ATTENTION = """
    AudioLDM2ProjectionModel AutoencoderKLCogVideoX AutoencoderKLKVAE AutoencoderKLKVAEVideo AutoencoderKLLTX2Video
    AutoencoderKLLTXVideo AutoencoderKLMagvit AutoencoderOobleck AutoencoderTiny Cosmos3AVAEAudioTokenizer
    Ideogram4PromptEnhancerHead IFWatermarker Kandinsky6SRLatentUpscalerBank Kandinsky6SRVAE LongCatAudioDiTVae
    LTX2LatentUpsamplerModel LTX2Vocoder LTX2VocoderWithBWE LTXLatentUpsamplerModel MiniMaxMusic3ConditionEncoder
    MiniMaxMusic3Vocoder MLPNeRSTFModel MMAudioVocoder MultiAdapter PaellaVQModel ReduxImageEncoder ShapEParamsProjModel
    ShapERenderer StableAudio3DurationEmbedder StableAudioProjectionModel StableUnCLIPImageNormalizer T2IAdapter
    UnCLIPTextProjModel
"""
_OF_TRANSFORMERS = "CLIPImageProjection SpectrogramContEncoder SpectrogramNotesEncoder UniDiffuserTextDecoder"
_SEVERAL = """
    FluxMultiControlNetModel HunyuanDiT2DMultiControlNetModel MultiControlNetModel MultiControlNetUnionModel
    QwenImageMultiControlNetModel SD3MultiControlNetModel
"""
#: Model classes without a case, and why.
LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(_NO_ATTENTION.split(), "no attention"),
    **dict.fromkeys(_OF_TRANSFORMERS.split(), "its attention is a module of transformers"),
    **dict.fromkeys(_SEVERAL.split(), "a list of models that have cases"),
    "AceStepLyricEncoder": "inside AceStepConditionEncoder",
    "AceStepTimbreEncoder": "inside AceStepConditionEncoder",
    "ControlNetXSAdapter": "has no forward; its parts are in UNetControlNetXSModel",
    "MotionAdapter": "has no forward; its parts are in UNetMotionModel",
    "RFD4ProteinaAutoencoder": "the attention module of RFD4ProteinaTransformer, behind tables of chemistry",
    "UTransformer2DModel": "inside UniDiffuserModel",
}
