"""The numbers that the paper prints for MNIST (Tables 1 and 2)."""

# Table 1 of the paper: who, error in percent, weights as printed.
PAPER_ERRORS = {
    "lenet-300-100": [("baseline", "1.64", "267K"), ("Han et al.", "1.59", "22K"), ("DSC-1, best", "1.57", "17.4K")],
    "lenet-5": [("baseline", "0.80", "431K"), ("Han et al.", "0.77", "36K"), ("DSC-1, best", "0.77", "15.8K")],
}

# Table 2 of the paper: percent kept by layer, of Han et al. and of DSC-1.
PAPER_LAYERS = {
    "lenet-300-100": {"fc1": (8, 4.6), "fc2": (9, 20.1), "fc3": (26, 68.5), "total": (8.2, 6.5)},
    "lenet-5": {"conv1": (66, 75), "conv2": (12, 29.1), "fc1": (8, 1.8), "fc2": (19, 17.2), "total": (8.4, 3.6)},
}
# The count at which Table 2 lists the layers.
TABLE_2_KEPT = {"lenet-300-100": 17_329, "lenet-5": 15_781}
