"""Makes classifiers of causal language models, by transformers."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification


def save_classifier(model_dir: Path, directory: Path, *, seed: int = 5, pad: int | None = None) -> Path:
    """Save a classifier of one label with the layers of a model, and a head that tells texts apart."""
    config = AutoConfig.from_pretrained(model_dir, num_labels=1, pad_token_id=pad)
    generator = torch.Generator().manual_seed(seed)
    classifier = AutoModelForSequenceClassification.from_config(config)
    source = AutoModelForCausalLM.from_pretrained(model_dir)
    classifier.model.load_state_dict(source.model.state_dict())
    with torch.no_grad():
        classifier.score.weight.normal_(std=0.1, generator=generator)
    classifier.save_pretrained(directory)
    return directory
