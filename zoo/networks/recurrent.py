"""Recurrent layers and embeddings."""

import torch
import torch.nn.functional as F
from torch import nn

from networks.registry import network, sequences, words


@network("lstm", "exact", "rnn.weight_hh_l0", 1, example=sequences)
class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(7, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


@network("gru", "exact", "rnn.weight_hh_l0", 1, example=sequences)
class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(7, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


@network("rnn", "exact", "rnn.weight_hh_l0", 1, example=sequences)
class Rnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(7, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        _, last = self.rnn(x.transpose(0, 1))
        return self.head(last[0])


@network("lstm_cell", "exact", "cell.weight_hh", 1, example=sequences)
class LstmCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(7, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        assert state is not None
        return self.head(state[0])


@network("gru_cell", "exact", "cell.weight_hh", 1, example=sequences)
class GruCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(7, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        state = x.new_zeros(x.shape[0], self.cell.hidden_size)
        outputs = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(self.head(state))
        return torch.stack(outputs, 1)


@network("embedding", "exact", "embedding.weight", 1, example=words)
class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.second = nn.Linear(8, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(F.gelu(self.second(self.embedding(x))))


@network("embedding_bag", "exact", "embedding.weight", 1, example=words)
class EmbeddingBag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(11, 8, mode="sum")
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(F.relu(self.embedding(x)))
