import collections
import itertools
import json

import numpy as np
import pytest

from research.data import corpus, packing
from research.data.packing import BOS, PackingSpec

FEATURES = ("inputs", "targets", "segments", "positions")
SPECS = [
    PackingSpec(seq_len=64, batch_size=2),
    PackingSpec(seq_len=64, batch_size=3, chunk_len=16, alignment=16),
    PackingSpec(seq_len=61, batch_size=2, alignment=8),  # a ragged row: its last window of 8 is never finished
    PackingSpec(seq_len=64, batch_size=1, chunk_len=24, alignment=8),
    PackingSpec(seq_len=48, batch_size=2, chunk_len=7),
    PackingSpec(seq_len=32, batch_size=2, alignment=128),  # longer than a row: one chunk per row
]
each_spec = pytest.mark.parametrize("spec", SPECS, ids=str)


def documents(sizes):
    rng = np.random.default_rng(0)
    return [corpus.Document(str(i), rng.integers(0, 256, size, np.uint8)) for i, size in enumerate(sizes)]


MIXED = documents([1, 2, 200, 7, 64, 65, 63, 128, 24, 25, 16, 17, 48, 49, 500, *range(3, 60, 4)])


def expected_chunks(docs, longest):
    """How often each chunk, a tuple of (input, target) pairs, occurs; found by walking byte by byte."""
    chunks = collections.Counter()
    for document in docs:
        before, chunk = BOS, []
        for byte in document.text.tolist():
            chunk.append((before, byte))
            before = byte
            if len(chunk) == longest:
                chunks[tuple(chunk)] += 1
                chunk = []
        if chunk:
            chunks[tuple(chunk)] += 1
    return chunks


def segments_of(batches, spec):
    """Yields (start, chunk) of every segment, and checks that the rows are well formed."""
    for batch in batches:
        assert {name: array.dtype for name, array in batch.items()} == dict.fromkeys(FEATURES, np.dtype("int32"))
        assert {array.shape for array in batch.values()} == {(spec.batch_size, spec.seq_len)}
        for row in range(spec.batch_size):
            columns = list(zip(*(batch[name][row].tolist() for name in FEATURES), strict=True))
            start, free, expected = 0, 0, itertools.count()
            for segment, run in itertools.groupby(columns, key=lambda column: column[2]):
                run = list(run)
                if segment == -1:
                    assert set(run) == {(0, 0, -1, 0)}
                else:
                    assert segment == next(expected)
                    assert [column[3] for column in run] == list(range(len(run)))
                    assert start == free  # nothing but the alignment separates segments
                    free = -(-(start + len(run)) // spec.alignment) * spec.alignment
                    yield start, tuple(column[:2] for column in run)
                start += len(run)


def take(dataset_or_iterator, n):
    return list(itertools.islice(dataset_or_iterator, n))


def same(left, right):
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
        for a, b in zip(left, right, strict=True)
    )


@each_spec
def test_one_epoch_has_every_byte_as_a_target_once_within_its_document(spec):
    found = list(segments_of(packing.batches(MIXED, spec, 0, repeat=False), spec))
    # Inputs and targets of a chunk are compared together, so a target of another document would show.
    assert collections.Counter(chunk for _, chunk in found) == expected_chunks(MIXED, spec.longest_chunk)
    assert sum(len(chunk) for _, chunk in found) == sum(len(document.text) for document in MIXED)


@each_spec
def test_starts_are_aligned_only_as_asked(spec):
    starts = {start for start, _ in segments_of(packing.batches(MIXED, spec, 0, repeat=False), spec)}
    assert all(start % spec.alignment == 0 for start in starts)
    if spec.alignment < spec.seq_len:
        assert len(starts) > 1
    if spec.alignment == 1:
        assert any(start % 2 for start in starts)


@each_spec
def test_training_sees_every_chunk_equally_often(spec):
    chunks = expected_chunks(MIXED, spec.longest_chunk)
    iterator = iter(packing.batches(MIXED, spec, 0, repeat=True))
    seen = collections.Counter()
    while sum(seen.values()) < 3 * sum(chunks.values()):
        # A buffer of whole rows holds a contiguous part of the shuffled stream.
        buffer = take(iterator, packing._BATCHES_PER_BUFFER)
        seen.update(chunk for _, chunk in segments_of(buffer, spec))
        epochs = sum(seen.values()) // sum(chunks.values())
        for chunk, count in chunks.items():
            assert epochs * count <= seen[chunk] <= (epochs + 1) * count
    assert seen.keys() == chunks.keys()


def test_epochs_come_in_new_orders_and_seeds_do_not_share_them():
    # Full rows only, one chunk each, and a whole number of buffers: epochs end where buffers end.
    spec = PackingSpec(seq_len=32, batch_size=1)
    per_epoch = 4 * packing._BATCHES_PER_BUFFER
    docs = documents([32 * per_epoch])

    def epochs(seed):
        batches = take(packing.batches(docs, spec, seed, repeat=True), 3 * per_epoch)
        rows = [batch["targets"].tobytes() for batch in batches]
        return [rows[i * per_epoch : (i + 1) * per_epoch] for i in range(3)]

    orders = [*epochs(0), *epochs(1)]
    assert all(sorted(order) == sorted(orders[0]) and len(set(order)) == per_epoch for order in orders)
    for one, other in itertools.combinations(orders, 2):
        assert one != other
        # Not only the rows of a buffer are shuffled: other chunks come first.
        first = packing._BATCHES_PER_BUFFER
        assert set(one[:first]) != set(other[:first])


def test_a_seed_reproduces_its_batches_and_another_does_not():
    spec = SPECS[1]
    batches = take(packing.batches(MIXED, spec, 5, repeat=True), 40)
    assert same(batches, take(packing.batches(MIXED, spec, 5, repeat=True), 40))
    assert not same(batches[:1], take(packing.batches(MIXED, spec, 6, repeat=True), 1))


@each_spec
@pytest.mark.parametrize("done", [0, 16, 37])
def test_a_restored_iterator_goes_on_with_the_same_batches(spec, done):
    assert done % packing._BATCHES_PER_BUFFER in (0, 5)  # at the edge of a buffer, and inside one
    iterator = iter(packing.batches(MIXED, spec, 3, repeat=True))
    take(iterator, done)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = take(iterator, 50)

    fresh = iter(packing.batches(MIXED, spec, 3, repeat=True))
    fresh.set_state(state)
    assert same(take(fresh, 50), expected)

    iterator.set_state(state)  # an iterator that has gone further goes back
    assert same(take(iterator, 50), expected)


def test_an_epoch_ends_with_rows_of_padding():
    spec = PackingSpec(seq_len=8, batch_size=4)
    [first, last] = packing.batches(documents([8] * 5), spec, 0, repeat=False)
    assert (first["segments"] == 0).all()
    assert (last["segments"] == [[0], [-1], [-1], [-1]]).all()


def test_a_corpus_of_one_byte_repeats():
    spec = PackingSpec(seq_len=3, batch_size=1)
    [batch] = take(packing.batches([corpus.Document("x", np.array([7], np.uint8))], spec, 0, repeat=True), 1)
    assert {name: array.tolist() for name, array in batch.items()} == {
        "inputs": [[BOS, BOS, BOS]],
        "targets": [[7, 7, 7]],
        "segments": [[0, 1, 2]],
        "positions": [[0, 0, 0]],
    }


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"chunk_len": 130, "alignment": 128}, r"data\.chunk_len=130: must be a multiple of 128, .*align_starts=False"),
        ({"chunk_len": 64, "alignment": 128}, r"data\.chunk_len=64: must be a multiple of 128, .* aligned starts"),
    ],
)
def test_bad_specs(fields, message):
    with pytest.raises(ValueError, match=message):
        PackingSpec(**{"seq_len": 512, "batch_size": 4, **fields})


@pytest.mark.parametrize(
    "seq_len, chunk_len, alignment, longest",
    [(489, 0, 128, 489), (489, 489, 128, 489), (512, 128, 128, 128), (512, 130, 1, 130), (64, 0, 128, 64)],
)
def test_chunk_lengths_that_serve(seq_len, chunk_len, alignment, longest):
    assert PackingSpec(seq_len, 1, chunk_len, alignment).longest_chunk == longest
