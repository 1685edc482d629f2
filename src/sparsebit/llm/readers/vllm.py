"""vLLM, by a table of its rules (0.12): it wants a GPU, so it is not run.

Layers that read one input (q, k, v; gate and up) become one layer there, so they must have one grid.
"""

from __future__ import annotations

from collections.abc import Iterator

from sparsebit.llm.readers import READERS, Plan, Reader, Verdict
from sparsebit.llm.readers.transformers import version_of

BITS = {"compressed-tensors": (4, 8), "int-quantized": (8,), "gptq": (2, 3, 4, 8)}
GROUPS = (None, 32, 64, 128)
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_NAMES = """
AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM BambaForCausalLM BloomForCausalLM CohereForCausalLM
Cohere2ForCausalLM DbrxForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM
Dots1ForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM ExaoneForCausalLM Exaone4ForCausalLM
FalconForCausalLM FalconMambaForCausalLM FalconH1ForCausalLM FlexOlmoForCausalLM GemmaForCausalLM
Gemma2ForCausalLM Gemma3ForCausalLM Gemma3nForCausalLM Qwen3NextForCausalLM GlmForCausalLM Glm4ForCausalLM
Glm4MoeForCausalLM GptOssForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM
GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSharedForCausalLM
InternLMForCausalLM InternLM2ForCausalLM JambaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM LlamaForCausalLM
Llama4ForCausalLM LongcatFlashForCausalLM MambaForCausalLM Mamba2ForCausalLM MiniCPMForCausalLM
MiniCPM3ForCausalLM MiniMaxForCausalLM MistralForCausalLM MixtralForCausalLM MptForCausalLM NemotronForCausalLM
NemotronHForCausalLM OlmoForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoeForCausalLM OPTForCausalLM
PersimmonForCausalLM PhiForCausalLM Phi3ForCausalLM PhiMoEForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM
Qwen3ForCausalLM Qwen3MoeForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM StableLmForCausalLM Starcoder2ForCausalLM
SolarForCausalLM Zamba2ForCausalLM AriaForConditionalGeneration Blip2ForConditionalGeneration
ChameleonForConditionalGeneration FuyuForCausalLM Gemma3ForConditionalGeneration Gemma3nForConditionalGeneration
Glm4vForConditionalGeneration Idefics3ForConditionalGeneration InternVLForConditionalGeneration
Llama4ForConditionalGeneration LlavaForConditionalGeneration LlavaNextForConditionalGeneration
LlavaOnevisionForConditionalGeneration Mistral3ForConditionalGeneration PaliGemmaForConditionalGeneration
PixtralForConditionalGeneration Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration
Qwen2AudioForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
SmolVLMForConditionalGeneration WhisperForConditionalGeneration
"""
CLASSES = frozenset(_NAMES.split())


@READERS.register()
class Vllm(Reader):
    TYPE = "vLLM"
    formats = ("compressed-tensors", "int-quantized", "turned", "gptq", "dense")

    def version(self) -> str:
        return version_of("vllm")

    def missing(self, plan: Plan) -> str:
        return "those of 0.12; not run"

    def judge(self, plan: Plan) -> Verdict:
        return Verdict(next(_refusals(plan), ""))


def _refusals(plan: Plan) -> Iterator[str]:
    if plan.architecture not in CLASSES:
        yield f"{plan.architecture} is not in the table of its classes"
    if plan.format == "turned":
        yield "it has no Conv1D layers in packed form"
    bits = BITS.get(plan.format)
    for name, layer in plan.layers.items() if bits else ():
        spec = layer.spec
        if bits and spec.bits not in bits:
            yield f"{spec.bits} bits, and its kernels have {', '.join(map(str, bits))}"
        if spec.group and layer.inputs % spec.group:
            yield f"{layer.inputs} inputs of {name} are no multiple of {spec.group}"
        if spec.group not in GROUPS:
            yield f"groups of {spec.group}, and its kernels have 32, 64, 128 and whole rows"
        if layer.expert and not spec.symmetric:
            yield "its experts have no zero points"
        if plan.format == "gptq" and not spec.symmetric and spec.bits not in (4, 8):
            yield f"zero points at {spec.bits} bits"
    if bits:
        yield from _joined(plan)
    experts = {layer.spec for layer in plan.layers.values() if layer.expert}
    if len(experts) > 1:
        yield "experts of one layer have different grids"


def _joined(plan: Plan) -> Iterator[str]:
    """Layers that it makes one."""
    for name, layer in plan.layers.items():
        owner, _, leaf = name.rpartition(".")
        for family in JOINED:
            for other in family if leaf == family[0] else ():
                there = plan.layers.get(f"{owner}.{other}")
                if there is not None and there.spec != layer.spec:
                    yield f"{leaf} and {other} of {owner} have different grids, and it joins them"
