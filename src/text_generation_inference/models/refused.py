"""Architectures that are known and not served: why, and what to use instead; for errors and docs/models.md."""

from dataclasses import dataclass

from text_generation_inference.models.config import Config


@dataclass(frozen=True, slots=True)
class Unserved:
    reason: str
    instead: str


ENCODER_DECODER = Unserved(
    "it is an encoder-decoder: each token attends over the states of an encoder too, which no cache here keeps",
    "Use a decoder-only model, which takes the same instructions as a prompt, or run it with `transformers`.",
)
RECURRENT = Unserved(
    "it is recurrent: what it keeps of a sequence is a state, and no keys and values of tokens that could be shared,"
    " cut into blocks or computed again in part",
    "Use a model with attention of the same size.",
)
IMAGES = Unserved(
    "it reads images in a way that is not served yet",
    "Use one of the models with images that docs/models.md lists. Of Llama 4 the text model is served.",
)
SANTACODER = Unserved(
    "it is computed by code of an older kind that comes with the model and attends in its own way",
    "Use bigcode/gpt_bigcode-santacoder, the same model in a form without code.",
)

REFUSED = {
    **dict.fromkeys(
        (
            "T5ForConditionalGeneration",
            "MT5ForConditionalGeneration",
            "UMT5ForConditionalGeneration",
            "LongT5ForConditionalGeneration",
            "SwitchTransformersForConditionalGeneration",
            "BartForConditionalGeneration",
            "MBartForConditionalGeneration",
            "BlenderbotForConditionalGeneration",
            "PegasusForConditionalGeneration",
            "M2M100ForConditionalGeneration",
            "MarianMTModel",
        ),
        ENCODER_DECODER,
    ),
    **dict.fromkeys(("MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM", "RwkvForCausalLM"), RECURRENT),
    "IdeficsForVisionText2Text": IMAGES,
    "GPT2LMHeadCustomModel": SANTACODER,
}


def find_refusal(config: Config) -> Unserved | None:
    """Of an architecture that no file here builds: by its name, or by what its config says of it."""
    name = str(config.fields["architectures"][0])
    if name in REFUSED:
        return REFUSED[name]
    if config.get("is_encoder_decoder") is True:
        return ENCODER_DECODER
    has_images = isinstance(config.get("vision_config"), dict) and not name.endswith("ForCausalLM")
    return IMAGES if has_images else None
