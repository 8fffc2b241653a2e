"""The paper's networks."""

from keepk.paper.models.densenet import DenseNet40 as DenseNet40
from keepk.paper.models.lenet import LeNet5 as LeNet5
from keepk.paper.models.lenet import LeNet300 as LeNet300
from keepk.paper.models.parameters import printed_parameters as printed_parameters
from keepk.paper.models.vgg import VGG16 as VGG16
