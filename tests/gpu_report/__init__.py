"""The report of a machine with a GPU: `python -m tests.gpu_report --minutes 8 --out DIR`.

It needs no network and no installation of Vitrine. Each step is a process of its own with a time
limit. Its results are written at once, so that a step that crashes, hangs or runs out of memory
loses none of them and does not stop the next one. `--dry-run` executes the same code on a CPU with
small sizes.
"""
