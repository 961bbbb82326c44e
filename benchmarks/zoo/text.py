"""Language models of transformers: encoders, decoders, both, mixtures of experts, state spaces."""

from __future__ import annotations

from functools import partial
from typing import Any

from zoo.model import (
    VOCABULARY,
    ZooModel,
    causal_batch,
    classified_text_batch,
    masked_batch,
    pretrained,
    translation_batch,
)

TOKENS = 64
WIDTH = 128
HEADS = 4
LAYERS = 2

# Sizes by the names that most configurations have.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
_WIDE = _SIZES | {"intermediate_size": 4 * WIDTH, "max_position_embeddings": 2 * TOKENS}
_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = _WIDE | _IDS | {"use_cache": False}
_ENCODER_DECODER = _IDS | {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 4 * WIDTH,
    "decoder_ffn_dim": 4 * WIDTH,
    "max_position_embeddings": 2 * TOKENS,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "use_cache": False,
}
_T5 = _IDS | {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": WIDTH // HEADS,
    "d_ff": 4 * WIDTH,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
    "use_cache": False,
}


def _encoder(name: str, model: str, config: str, **sizes: Any) -> ZooModel:
    return pretrained(name, "text encoder", model, config, partial(masked_batch, TOKENS), **sizes)


def _decoder(name: str, model: str, config: str, family: str = "text decoder", **sizes: Any) -> ZooModel:
    return pretrained(name, family, model, config, partial(causal_batch, TOKENS), **sizes)


def _translator(name: str, model: str, config: str, **sizes: Any) -> ZooModel:
    return pretrained(name, "text encoder-decoder", model, config, partial(translation_batch, TOKENS), **sizes)


TEXT: tuple[ZooModel, ...] = (
    _encoder("bert", "BertForMaskedLM", "BertConfig", **_WIDE),
    _encoder("roberta", "RobertaForMaskedLM", "RobertaConfig", **_WIDE),
    _encoder("xlm-r", "XLMRobertaForMaskedLM", "XLMRobertaConfig", **_WIDE),
    _encoder(
        "distilbert", "DistilBertForMaskedLM", "DistilBertConfig",
        vocab_size=VOCABULARY, dim=WIDTH, hidden_dim=4 * WIDTH, n_layers=LAYERS, n_heads=HEADS,
    ),
    _encoder("albert", "AlbertForMaskedLM", "AlbertConfig", embedding_size=32, **_WIDE),
    _encoder(
        "deberta-v2", "DebertaV2ForMaskedLM", "DebertaV2Config",
        relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=32, share_att_key=True,
        norm_rel_ebd="layer_norm", **_WIDE,
    ),
    _encoder("electra", "ElectraForMaskedLM", "ElectraConfig", embedding_size=64, **_WIDE),
    _encoder("mpnet", "MPNetForMaskedLM", "MPNetConfig", **_WIDE),
    _encoder("modernbert", "ModernBertForMaskedLM", "ModernBertConfig", local_attention=16, **_IDS, **_WIDE),
    pretrained(
        "xlnet", "text encoder", "XLNetForSequenceClassification", "XLNetConfig",
        partial(classified_text_batch, TOKENS),
        vocab_size=VOCABULARY, d_model=WIDTH, n_layer=LAYERS, n_head=HEADS, d_inner=4 * WIDTH, num_labels=2,
        **_IDS,
    ),
    pretrained(
        "funnel", "text encoder", "FunnelForSequenceClassification", "FunnelConfig",
        partial(classified_text_batch, TOKENS),
        vocab_size=VOCABULARY, d_model=WIDTH, n_head=HEADS, d_head=32, d_inner=4 * WIDTH, block_sizes=[1, 1],
        num_labels=2,
    ),
    _encoder(
        "longformer", "LongformerForMaskedLM", "LongformerConfig", attention_window=16, **_WIDE,
    ),
    _encoder("big-bird", "BigBirdForMaskedLM", "BigBirdConfig", attention_type="original_full", **_WIDE),
    pretrained(
        "fnet", "text encoder", "FNetForSequenceClassification", "FNetConfig",
        lambda n: {k: v for k, v in classified_text_batch(TOKENS, n).items() if k != "attention_mask"},
        num_labels=2, **{k: v for k, v in _WIDE.items() if k != "num_attention_heads"},
    ),
    _decoder(
        "gpt2", "GPT2LMHeadModel", "GPT2Config",
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=2 * TOKENS, **_IDS,
    ),
    _decoder(
        "gpt-neo", "GPTNeoForCausalLM", "GPTNeoConfig",
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_layers=LAYERS, num_heads=HEADS, window_size=16,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=2 * TOKENS, **_IDS,
    ),
    _decoder("gpt-neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", **_DECODER),
    _decoder(
        "gptj", "GPTJForCausalLM", "GPTJConfig",
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=2 * TOKENS,
        rotary_dim=16, **_IDS,
    ),
    _decoder(
        "opt", "OPTForCausalLM", "OPTConfig", ffn_dim=4 * WIDTH, word_embed_proj_dim=WIDTH,
        max_position_embeddings=2 * TOKENS, layerdrop=0.1, **_SIZES, **_IDS,
    ),
    _decoder(
        "bloom", "BloomForCausalLM", "BloomConfig",
        vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, **_IDS,
    ),
    _decoder("llama", "LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, **_DECODER),
    _decoder(
        "mistral", "MistralForCausalLM", "MistralConfig", num_key_value_heads=2, sliding_window=32, **_DECODER,
    ),
    _decoder("qwen2", "Qwen2ForCausalLM", "Qwen2Config", num_key_value_heads=2, **_DECODER),
    _decoder("qwen3", "Qwen3ForCausalLM", "Qwen3Config", num_key_value_heads=2, head_dim=32, **_DECODER),
    _decoder("gemma2", "Gemma2ForCausalLM", "Gemma2Config", num_key_value_heads=2, head_dim=32, **_DECODER),
    _decoder("phi", "PhiForCausalLM", "PhiConfig", **_DECODER),
    _decoder("phi-3", "Phi3ForCausalLM", "Phi3Config", **_DECODER),
    _decoder("falcon", "FalconForCausalLM", "FalconConfig", **_SIZES, **_IDS),
    _decoder("stablelm", "StableLmForCausalLM", "StableLmConfig", num_key_value_heads=4, **_DECODER),
    _decoder("olmo2", "Olmo2ForCausalLM", "Olmo2Config", **_DECODER),
    _decoder(
        "mixtral", "MixtralForCausalLM", "MixtralConfig", "mixture of experts",
        num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2, output_router_logits=True,
        **_DECODER,
    ),
    _decoder(
        "olmoe", "OlmoeForCausalLM", "OlmoeConfig", "mixture of experts",
        num_experts=8, num_experts_per_tok=2, **_DECODER,
    ),
    _decoder(
        "deepseek-v3", "DeepseekV3ForCausalLM", "DeepseekV3Config", "mixture of experts",
        moe_intermediate_size=64, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2,
        first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=32, **_DECODER,
    ),
    _translator(
        "switch", "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
        num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=32, **_T5,
    ),
    _decoder(
        "mamba", "MambaForCausalLM", "MambaConfig", "state space",
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=LAYERS, state_size=8, **_IDS,
    ),
    _decoder(
        "mamba2", "Mamba2ForCausalLM", "Mamba2Config", "state space",
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=LAYERS, state_size=16, head_dim=16,
        num_heads=8, n_groups=1, chunk_size=32, **_IDS,
    ),
    pretrained(
        "rwkv", "state space", "RwkvForCausalLM", "RwkvConfig",
        lambda n: {k: v for k, v in causal_batch(16, n).items() if k != "attention_mask"},
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=LAYERS, use_cache=False, **_IDS,
    ),
    _translator("t5", "T5ForConditionalGeneration", "T5Config", **_T5),
    _translator("mt5", "MT5ForConditionalGeneration", "MT5Config", **_T5),
    _translator(
        "longt5", "LongT5ForConditionalGeneration", "LongT5Config",
        encoder_attention_type="transient-global", local_radius=7, global_block_size=8, **_T5,
    ),
    _translator(
        "bart", "BartForConditionalGeneration", "BartConfig", encoder_layerdrop=0.1, **_ENCODER_DECODER,
    ),
    _translator("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", **_ENCODER_DECODER),
    _translator("marian", "MarianMTModel", "MarianConfig", **_ENCODER_DECODER),
)  # fmt: skip
