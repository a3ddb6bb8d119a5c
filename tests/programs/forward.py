"""Reads a checkpoint of an MLP with h5py and prints the cross-entropy of the last quarter of the data."""

import json
import sys

import h5py
import numpy as np

with h5py.File(sys.argv[1]) as file:
    assert file.attrs["step"] == 12 and json.loads(file.attrs["config"])["--hidden"] == [12, 9]
    assert set(file["optimizer"]) == {"exp_avg", "exp_avg_sq"}
    assert set(file["optimizer/exp_avg"]) == set(file["model"])
    model = {name: tensor[:] for name, tensor in file["model"].items()}

with h5py.File(sys.argv[2]) as file:
    x, y = file["x"][30:], file["y"][30:]

for number in (1, 2, 3):
    x = x @ model[f"fc{number}.weight"].T + model[f"fc{number}.bias"]
    if number < 3:
        x = np.maximum(x, 0)
x = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
print(-x[np.arange(len(y)), y].mean())
