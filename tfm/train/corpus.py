"""The first stage: train the tokenizer on a balanced sample of the text and tokenise all of it."""

import json

from tfm.manifest import write_json
from tfm.tokenizer import load_tokenizer
from tfm.train.layout import Layout, stage_main
from tfm.train.loop import Deadline
from tfm.train.peers import ALONE, Peers
from tfm.train.settings import TrainSettings
from tfm.train.text import balanced_sample, iter_training_rows, tokenise_rows, training_manifest
from tfm.train.tokenizer import train_tokenizer


def run(settings: TrainSettings, layout: Layout, *, device: str, deadline: Deadline, peers: Peers = ALONE) -> dict:
    """Write the tokenizer beside the target's weights, or take the one there, and write the tokenised text."""
    if peers.is_first and not (layout.corpus.is_file() and layout.text_manifest.is_file()):
        rows = list(iter_training_rows(layout.data))
        if (layout.weights("target") / "tokenizer.json").is_file():
            tokenizer = load_tokenizer(layout.weights("target"))  # a family that is trained on, from its target
        else:
            tokenizer = train_tokenizer(balanced_sample(rows, settings.text.bytes_per_domain), settings.text.vocab_size)
            tokenizer.save(layout.weights("target"))
        if tokenizer.mask_id != settings.drafter_model.mask_token_id:
            raise ValueError(
                f"mask_token_id: {settings.drafter_model.mask_token_id} is not allowed (allowed: {tokenizer.mask_id}, "
                "the tokenizer's <|mask|>); set it in the drafter's config"
            )
        if settings.target_model.eos_token_id != (tokenizer.eos_id,):
            raise ValueError(
                f"eos_token_id: {settings.target_model.eos_token_id} is not allowed (allowed: {tokenizer.eos_id}, the "
                "tokenizer's <|im_end|>); set it in the target's config"
            )
        text = tokenise_rows(rows, tokenizer)
        layout.corpus.parent.mkdir(parents=True, exist_ok=True)
        text.save(layout.corpus)
        manifest = training_manifest(layout.data) | {"tokens": int(len(text.tokens)), "conversations": len(text)}
        # last and whole: it says that the text beside it is
        write_json(layout.text_manifest, manifest)
    peers.wait()
    manifest = json.loads(layout.text_manifest.read_text(encoding="utf-8"))
    return {"stage": "tokenizer", "done": True, **{key: manifest[key] for key in ("tokens", "conversations")}}


if __name__ == "__main__":
    stage_main("tokenizer", run, __doc__)
