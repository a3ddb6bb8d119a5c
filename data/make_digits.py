#!/usr/bin/env python3
"""Makes digits.h5 from MNIST's t10k files: python3 make_digits.py DIR-WITH-THE-GZIPPED-FILES digits.h5"""
import gzip
import sys

import h5py
import numpy as np

source, target = sys.argv[1:]
with gzip.open(f"{source}/t10k-images-idx3-ubyte.gz") as file:
    images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(10000, 28, 28)
with gzip.open(f"{source}/t10k-labels-idx1-ubyte.gz") as file:
    labels = np.frombuffer(file.read(), np.uint8, offset=8)

# Every tenth image is for testing, because the first half of t10k is easier than the second.
is_test = np.arange(10000) % 10 == 9
with h5py.File(target, "w", libver="earliest") as file:
    for name, chosen in ("train", ~is_test), ("test", is_test):
        group = file.create_group(name)
        options = dict(compression="gzip", compression_opts=9, track_times=False)
        group.create_dataset("images", data=images[chosen], chunks=(500, 28, 28), **options)
        group.create_dataset("labels", data=labels[chosen], **options)
    file.attrs["source"] = "MNIST test set (t10k), Y. LeCun, C. Cortes, C. J. C. Burges"
