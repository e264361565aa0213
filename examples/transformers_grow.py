"""A tiny BERT that grows while a Trainer of Hugging Face trains it; nothing is downloaded.

Needs: pip install 'esper-grow[transformers]'
"""

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import esper
from esper.tamiyo.controllers.scripted import ScriptedController


def accuracy(prediction):
    return {"accuracy": 100.0 * np.mean(prediction.predictions.argmax(-1) == prediction.label_ids)}


def main() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(3, 20, (240, 8))
    labels = torch.arange(240) % 3  # the label is the token 0, 1 or 2 in the text
    tokens[torch.arange(240), torch.randint(0, 8, (240,))] = labels
    rows = [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]
    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=3,
    )
    grow = esper.transformers.GrowCallback(
        slots=["bert.encoder.layer.0", "bert.encoder.layer.1"],
        monitor="eval_accuracy",
        compute_metrics=accuracy,
        controller=ScriptedController("2 GERMINATE r0c0 mlp_small linear\nauto FOSSILIZE", "mine"),
        budget=esper.Budget(params=1.5),
        settings=esper.GrowthSettings(incubation="joint"),
    )
    trainer = Trainer(
        BertForSequenceClassification(config),
        TrainingArguments(
            "checkpoints",
            num_train_epochs=8,
            per_device_train_batch_size=20,
            learning_rate=5e-3,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=rows[:160],
        eval_dataset=rows[160:],
        compute_metrics=accuracy,
        callbacks=[grow],
    )
    trainer.train()  # trainer.train(resume_from_checkpoint=True) would resume with the growth

    outcome = grow.body.outcome
    print(f"{outcome.val_score:.1f} %, {outcome.host_params} -> {outcome.params} parameters")
    for seed in outcome.seeds:
        print(f"  {seed.blueprint} in {seed.module}")
    plain = grow.export()  # a BertForSequenceClassification that needs no Esper
    plain.save_pretrained("grown")


if __name__ == "__main__":
    main()
