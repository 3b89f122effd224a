"""Train a small language model with Hugging Face's Trainer, kept alive by outlast.

    outlast run --nproc-per-node 2 examples/transformers/train.py --config outlast.toml --output out

It needs no network: the model is made from a configuration, the sentences from random numbers. Two ranks on a laptop
take a few seconds. Kill a rank, stop one, or send SIGTERM to one of them, and start it again: it ends with the weights
of a run that nothing happened to.
"""

import argparse
import hashlib

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from outlast.integrations.transformers import protect

WORDS = 64


class Sentences(torch.utils.data.Dataset):
    """Random words, the same for the same index."""

    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        words = torch.randint(WORDS, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="settings of outlast: .toml, .yaml or .json")
    parser.add_argument("--output", required=True, help="where the Trainer writes what is its own")
    parser.add_argument("--max-steps", type=int, default=100)
    options = parser.parse_args()
    set_seed(42)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            attention_dropout=0.1,
        )
    )
    args = TrainingArguments(
        output_dir=options.output,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=options.max_steps,
        learning_rate=1e-2,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        save_strategy="no",  # outlast saves; the Trainer's own checkpoints are optional
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model=model, args=args, train_dataset=Sentences(200), eval_dataset=Sentences(16))
    protect(trainer, options.config)
    result = trainer.train()
    weights = b"".join(weight.detach().cpu().numpy().tobytes() for weight in model.parameters())
    print("trained", result.global_step, "steps:", hashlib.sha256(weights).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
