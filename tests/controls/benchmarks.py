"""Guards of benchmarks."""

from tests.controls.guard import Guard

GUARDS = (
    Guard(
        "tests/benchmarks/bench_servers.py",
        "        if not cosine.min() >= bound:",
        "        if cosine.min() < bound:",
        "tests/benchmarks/test_bench_servers.py::test_peer_with_other_vectors_is_refused_by_name",
    ),
    Guard(
        "tests/benchmarks/comparison.py",
        "                    measured[name].clear()\n",
        "                    pass\n",
        "tests/benchmarks/test_bench_servers.py::"
        "test_contender_that_fails_is_named_and_the_others_are_measured",
    ),
    Guard(
        "tests/benchmarks/servers.py",
        "        if vectors is None or len(vectors) != len(texts):\n",
        "        if vectors is None:\n",
        "tests/benchmarks/test_bench_servers.py::test_peer_that_drops_texts_is_named",
    ),
)
