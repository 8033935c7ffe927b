"""A checkpoint in the shape of Qwen3.5-0.8B's text model, with random weights in bf16.

python experiments/fine_tune/make_checkpoint.py FOLDER [--tiny]     with torch and transformers installed
It has no tokenizer: whoever trains it takes bytes for ids. `--tiny` is for a look at the scripts on a CPU.
"""

import argparse

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

FULL = {
    "vocab_size": 248_320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262_144,
}

TINY = FULL | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def config(sizes):
    every_fourth = ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(sizes["num_hidden_layers"])]
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    return Qwen3_5TextConfig(
        **sizes,
        layer_types=every_fourth,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6,
        rope_parameters=rope,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    # A GPU draws a billion numbers in no time.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3_5ForCausalLM(config(TINY if args.tiny else FULL))
    model.to(torch.bfloat16).save_pretrained(args.folder)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, into {args.folder}")


main()
