"""int8 graphs for OpenVINO: weights and the activations before them in 8 bits, quality measured.

products.py  products of the graph, their inputs on calibration texts, and the int8 graph
rounding.py  smoothing of activations, and rounding of weights
quality.py   quality on texts that did not calibrate, and bounds for it
texts.py     calibration texts from the vocabulary, for an export without `--calibrate`
rows.py      rows of all lengths, for calibration and measurement
graph.py     the export: quantise, measure, and keep costly products in float until bounds hold
"""
