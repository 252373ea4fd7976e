"""What attention must equal, as plain loops in float64 that share no code with `research`; and how to compare."""

import numpy as np

DIFFERENTIABLE = ("q", "local", "compressed", "sinks")


def visible(visibility, segments, selected=None) -> np.ndarray:
    """Who sees whom in one sequence, token by token.

    Args:
      visibility: read for its numbers only: `window`, and `ratio` and `top_k` where it has them.
      segments: S ids, negative for padding.
      selected: None, or bool [S, C].

    Returns:
      bool [S, S + C], C of them whole windows.
    """
    segments = list(map(int, segments))
    selected = None if selected is None else np.asarray(selected)  # an element of a JAX array takes a program each
    seq_len, ratio = len(segments), getattr(visibility, "ratio", 0)
    entries = seq_len // ratio if ratio else 0
    mask = np.zeros((seq_len, seq_len + entries), bool)
    for t in range(seq_len):
        document = segments[t]
        if document < 0:
            continue
        for j in range(seq_len):
            mask[t, j] = j <= t and j > t - visibility.window and segments[j] == document
        room = entries if selected is None else visibility.top_k
        for c in range(entries):
            pooled = range(c * ratio, (c + 1) * ratio)
            chosen = selected is None or (selected[t, c] and room > 0)
            mask[t, seq_len + c] = chosen and all(token <= t and segments[token] == document for token in pooled)
            room -= mask[t, seq_len + c]
    return mask


def attention(inputs: dict, visibility, d_out) -> dict[str, np.ndarray]:
    """Attention and its gradients, one query after the other.

    Args:
      inputs: q [B, S, H, D], local [B, S, D], compressed [B, C, D], and sinks [H], segments [B, S] and selected
        [B, S, C] or None.
      visibility: see `visible`.
      d_out: [B, S, H, D], the cotangent of the output.

    Returns:
      "out" and the gradient of each of `DIFFERENTIABLE` that is not None, in the dtype of what they belong to.
    """
    q, local, compressed, d_out = (
        np.asarray(array, np.float64) for array in (inputs["q"], inputs["local"], inputs["compressed"], d_out)
    )
    batch, seq_len, heads, width = q.shape
    no_sink = np.full(heads, -np.inf)
    sinks = no_sink if inputs["sinks"] is None else np.asarray(inputs["sinks"], np.float64)
    keys = np.concatenate([local, compressed], axis=1)
    out, d_q, d_keys, d_sinks = (np.zeros_like(array) for array in (q, q, keys, no_sink))
    for b in range(batch):
        segments = np.zeros(seq_len, int) if inputs["segments"] is None else np.asarray(inputs["segments"][b])
        selected = None if inputs["selected"] is None else np.asarray(inputs["selected"][b])
        mask = visible(visibility, segments, selected)
        for t in range(seq_len):
            seen = np.flatnonzero(mask[t])
            if not len(seen):
                continue
            seen_keys = keys[b, seen]
            logits = q[b, t] @ seen_keys.T / np.sqrt(width)
            largest = np.maximum(logits.max(axis=-1), sinks)
            weights, sink_weight = np.exp(logits - largest[:, None]), np.exp(sinks - largest)
            total = weights.sum(axis=-1) + sink_weight
            weights, sink_weight = weights / total[:, None], sink_weight / total
            out[b, t] = weights @ seen_keys

            d_weights = d_out[b, t] @ seen_keys.T
            mean = (weights * d_weights).sum(axis=-1)
            d_logits = weights * (d_weights - mean[:, None]) / np.sqrt(width)
            d_q[b, t] = d_logits @ seen_keys
            d_keys[b, seen] += weights.T @ d_out[b, t] + d_logits.T @ q[b, t]
            d_sinks -= sink_weight * mean
    results = {"out": out, "q": d_q, "local": d_keys[:, :seq_len], "compressed": d_keys[:, seq_len:], "sinks": d_sinks}
    dtypes = {name: inputs[name].dtype for name in DIFFERENTIABLE if inputs[name] is not None}
    return {name: results[name].astype(dtype) for name, dtype in {"out": inputs["q"].dtype, **dtypes}.items()}


def assert_close(actual, expected, rtol_of_largest: float, atol: float = 0.0) -> None:
    """Fails unless shapes and dtypes agree and no entry is off by more than that share of the largest expected one.

    NaN and infinities must stand in the same places. Nothing is close to an array without entries. `atol` is added to
    what is allowed, for values that cancel to nothing.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    assert expected.size, f"shape {expected.shape}: nothing to compare"
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite], "NaN or infinities differ")
    assert np.isfinite(actual[finite]).all(), "not finite where it should be"
    if finite.any():
        error, largest = np.abs(actual - expected)[finite].max(), np.abs(expected[finite]).max()
        allowed = rtol_of_largest * largest + atol
        assert error <= allowed, f"off by {error:.2e}, allowed {allowed:.2e}, largest expected entry {largest:.2e}"
