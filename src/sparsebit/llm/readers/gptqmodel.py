"""GPTQModel, by a table of its rules (7.6): the models that it knows, and what its torch kernel takes."""

from __future__ import annotations

from collections.abc import Iterator

from sparsebit.llm.readers import READERS, Plan, Reader, Verdict
from sparsebit.llm.readers.transformers import version_of

GROUPS = (None, 16, 32, 64, 128, 256, 512, 1024)
_NAMES = """
apertus baichuan bloom chatglm codegen cohere cohere2 dbrx deepseek_v2 deepseek_v3 deepseek_v32 dots1 exaone
exaone4 falcon falcon_mamba gemma gemma2 gemma3 gemma3_text gemma3n glm glm4 glm4_moe glm4v glm4v_moe gpt2
gpt_bigcode gpt_neo gpt_neox gptj hunyuan_v1_dense hunyuan_v1_moe internlm internlm2 internvl jamba kimi_k2
llama llama4 minicpm minicpm3 minimax minimax_m2 mistral mixtral mllama moss mpt opt phi phi3 phi4mm phimoe qwen
qwen2 qwen2_5_omni qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe
smollm3 smolvlm stablelm starcoder2 xverse yi
"""
MODELS = frozenset(_NAMES.split())


@READERS.register()
class GptqModel(Reader):
    TYPE = "GPTQModel"
    formats = ("gptq",)

    def version(self) -> str:
        return version_of("gptqmodel")

    def missing(self, plan: Plan) -> str:
        return "those of 7.6; not run"

    def judge(self, plan: Plan) -> Verdict:
        return Verdict(next(_refusals(plan), ""))


def _refusals(plan: Plan) -> Iterator[str]:
    if plan.model_type not in MODELS:
        yield f"it has no definition of {plan.model_type or 'this model'}"
    for name, layer in plan.layers.items():
        if layer.spec.group and layer.inputs % layer.spec.group:
            yield f"{layer.inputs} inputs of {name} are no multiple of {layer.spec.group}"
        if layer.spec.group not in GROUPS:
            yield f"groups of {layer.spec.group}; it has {', '.join(str(g) for g in GROUPS if g)} and whole rows"
