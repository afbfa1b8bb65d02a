"""The forms of tool calls, one file each."""

from text_generation_inference.text.tools.form import CallForm
from text_generation_inference.text.tools.forms import (
    cohere,
    deepseek,
    glm,
    harmony,
    hermes,
    kimi,
    llama3,
    mistral,
    plain_json,
    qwen_xml,
    tagged_list,
)

FORMS: dict[str, CallForm] = {
    form.name: form
    for form in (
        hermes.FORM,
        qwen_xml.FORM,
        glm.FORM,
        llama3.FORM,
        mistral.FORM,
        mistral.WITH_ARGS,
        deepseek.FORM,
        kimi.FORM,
        harmony.FORM,
        cohere.FORM,
        tagged_list.FORM,
        plain_json.FORM,
    )
}
