"""BERT of transformers with its hand-written ("eager") attention: random weights, inference, against stock compile."""

from __future__ import annotations

import argparse

import torch

import sdpa_rewrite

try:
    from examples import _measure
except ImportError:  # run as a script
    import _measure  # type: ignore[no-redef]


def main(arguments: list[str] | None = None) -> None:
    """Explain one BERT, then measure it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    try:
        from transformers import BertConfig, BertModel
    except ImportError:
        print("this example needs transformers: pip install 'sdpa-rewrite[examples]'")
        return
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=options.width,
        num_attention_heads=options.width // 32,
        num_hidden_layers=options.layers,
        intermediate_size=2 * options.width,
        max_position_embeddings=options.tokens,
        attn_implementation="eager",
    )
    model = BertModel(config).eval()
    ids = torch.randint(0, config.vocab_size, (2, options.tokens))
    padding = (torch.arange(options.tokens) < torch.tensor([[options.tokens], [options.tokens * 3 // 4]])).long()
    with torch.no_grad():
        print(sdpa_rewrite.explain(model, ids, padding))
        stock = torch.compile(model)
        ours = torch.compile(model, backend="sdpa_rewrite")
        expected, found = (m(ids, padding).last_hidden_state for m in (model, ours))
        print(f"largest difference from eager: {float((expected - found).abs().max()):.0e}")
        if options.repeats:
            _measure.report("BERT", lambda: stock(ids, padding), lambda: ours(ids, padding), options.repeats)


if __name__ == "__main__":
    main()
