"""GPT-2 of transformers with its hand-written ("eager") attention: a training step, against stock compile."""

from __future__ import annotations

import argparse

import torch

import sdpa_rewrite

try:
    from examples import _measure
except ImportError:  # run as a script
    import _measure  # type: ignore[no-redef]


def main(arguments: list[str] | None = None) -> None:
    """Explain one GPT-2 in training, then measure a step of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        print("this example needs transformers: pip install 'sdpa-rewrite[examples]'")
        return
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=1000,
        n_embd=options.width,
        n_head=options.width // 32,
        n_layer=options.layers,
        n_positions=options.tokens,
        use_cache=False,
        attn_implementation="eager",
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    )
    model = GPT2LMHeadModel(config).train()
    ids = torch.randint(0, config.vocab_size, (2, options.tokens))
    print(sdpa_rewrite.explain(lambda x: model(x, labels=x).loss, ids))

    def step(call: object) -> float:
        model.zero_grad()
        loss = call(ids, labels=ids).loss  # type: ignore[operator]
        loss.backward()
        return float(loss.detach())

    stock, ours = torch.compile(model), torch.compile(model, backend="sdpa_rewrite")
    eager, fused = step(model), step(ours)
    print(f"loss in eager {eager:.5f}, compiled {fused:.5f}")
    if options.repeats:
        _measure.report("a GPT-2 training step", lambda: step(stock), lambda: step(ours), options.repeats)


if __name__ == "__main__":
    main()
