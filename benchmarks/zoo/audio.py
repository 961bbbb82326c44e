"""Speech models of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.model import VOCABULARY, ZooModel, pretrained

SAMPLE_POINTS = 4000
WIDTH = 128
FRAMES = 200
_SPEECH: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 4 * WIDTH,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 8, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 32,
    "pad_token_id": 0,
    "ctc_loss_reduction": "mean",
}


def _speech_batch(samples: int) -> dict[str, Tensor]:
    return {
        "input_values": torch.randn(samples, SAMPLE_POINTS),
        "attention_mask": torch.ones(samples, SAMPLE_POINTS, dtype=torch.long),
        "labels": torch.randint(1, 32, (samples, 12)),
    }


def _whisper_batch(samples: int) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(samples, 40, FRAMES),
        "labels": torch.randint(3, VOCABULARY, (samples, 24)),
    }


def _spectrogram_batch(samples: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(samples, 64, 32), "labels": torch.arange(samples) % 5}


AUDIO: tuple[ZooModel, ...] = (
    pretrained("wav2vec2", "audio", "Wav2Vec2ForCTC", "Wav2Vec2Config", _speech_batch, **_SPEECH),
    pretrained(
        "wav2vec2, masked", "audio", "Wav2Vec2ForCTC", "Wav2Vec2Config", _speech_batch,
        mask_time_prob=0.2, mask_time_length=4, layerdrop=0.1, **_SPEECH,
    ),
    pretrained("hubert", "audio", "HubertForCTC", "HubertConfig", _speech_batch, **_SPEECH),
    pretrained(
        "whisper", "audio", "WhisperForConditionalGeneration", "WhisperConfig", _whisper_batch,
        vocab_size=VOCABULARY, num_mel_bins=40, d_model=WIDTH, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH, max_source_positions=FRAMES // 2, max_target_positions=48, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False,
    ),
    pretrained(
        "audio spectrogram", "audio", "ASTForAudioClassification", "ASTConfig", _spectrogram_batch,
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=4 * WIDTH,
        patch_size=8, time_stride=8, frequency_stride=8, max_length=64, num_mel_bins=32, num_labels=5,
    ),
)  # fmt: skip
