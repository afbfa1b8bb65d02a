"""The forms of tool calls, one file each."""

from text_generation_inference.text.tools.form import CallForm
from text_generation_inference.text.tools.forms import (
    cohere,
    deepseek,
    glm,
    harmony,
    hermes,
    invoke,
    kimi,
    llama3,
    mistral,
    plain_json,
    pythonic,
    qwen_xml,
    tagged_list,
)

FORMS: dict[str, CallForm] = {
    form.name: form
    for form in (
        hermes.FORM,
        qwen_xml.FORM,
        qwen_xml.SEED,
        invoke.MINIMAX,
        invoke.DSML,
        glm.FORM,
        llama3.FORM,
        mistral.FORM,
        mistral.WITH_ARGS,
        deepseek.FORM,
        deepseek.WITH_ARGS,
        kimi.FORM,
        harmony.FORM,
        cohere.FORM,
        tagged_list.FORM,
        pythonic.FORM,
        plain_json.FORM,
    )
}
