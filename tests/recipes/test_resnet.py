import pytest
import torch
from torch import nn

from launcher.errors import ConfigError
from launcher.recipe import load_recipe, registry_of
from tests.recipe.own import config_of

# torchvision's models, and table 1 of arXiv:1512.03385, at 1000 classes
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}
LAYERS = {name: int(name.removeprefix("resnet")) for name in PARAMETERS}


def build(name, num_classes=1000, in_channels=3, image_size=224, **options):
    return registry_of(None).models[name](num_classes, in_channels, image_size, **options)


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameter_counts(name, count):
    with torch.device("meta"):
        network = build(name)
    assert sum(parameter.numel() for parameter in network.parameters()) == count


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("name", "layers"), LAYERS.items())
def test_the_name_counts_the_layers_on_the_main_path(name, layers):
    with torch.device("meta"):
        network = build(name)
    main_path = [
        module
        for path, module in network.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear) and "downsample" not in path
    ]
    assert len(main_path) == layers


def sizes_after_stages(network, images):
    sizes = []
    for stage in (network.maxpool, network.layer1, network.layer2, network.layer3, network.layer4):
        stage.register_forward_hook(lambda module, inputs, output: sizes.append(tuple(output.shape[1:])))
    network(images)
    return sizes


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("name", "image_size", "options", "expected"),
    [
        ("resnet18", 224, {}, [(64, 56), (64, 56), (128, 28), (256, 14), (512, 7)]),
        ("resnet50", 224, {}, [(64, 56), (256, 56), (512, 28), (1024, 14), (2048, 7)]),
        ("resnet18", 8, {}, [(64, 8), (64, 8), (128, 4), (256, 2), (512, 1)]),
        ("resnet18", 64, {}, [(64, 64), (64, 64), (128, 32), (256, 16), (512, 8)]),
        ("resnet18", 65, {}, [(64, 17), (64, 17), (128, 9), (256, 5), (512, 3)]),
        ("resnet18", 32, {"stem": "imagenet"}, [(64, 8), (64, 8), (128, 4), (256, 2), (512, 1)]),
        ("resnet18", 72, {"stem": "small"}, [(64, 72), (64, 72), (128, 36), (256, 18), (512, 9)]),
    ],
)
def test_sizes_of_the_stages(name, image_size, options, expected):
    with torch.device("meta"):
        network = build(name, image_size=image_size, **options).eval()
        sizes = sizes_after_stages(network, torch.zeros(1, 3, image_size, image_size))
    assert sizes == [(channels, size, size) for channels, size in expected]


def test_the_bottleneck_strides_on_its_3x3():
    with torch.device("meta"):
        block = build("resnet50").layer2[0]
    assert (block.conv1.stride, block.conv2.stride, block.conv3.stride) == ((1, 1), (2, 2), (1, 1))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("name", "last_norm"), [("resnet18", "bn2"), ("resnet50", "bn3")])
@pytest.mark.parametrize("zero", [True, False])
def test_zero_init_residual_starts_blocks_as_their_shortcut(name, last_norm, zero):
    torch.manual_seed(0)
    network = build(name, num_classes=10, in_channels=1, image_size=8, zero_init_residual=zero).eval()
    for path, module in network.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            assert bool((module.weight == 0).all()) == (zero and path.endswith(last_norm)), path
    block = network.layer1[1]  # its shortcut is the identity
    x = torch.rand(2, 64 * block.expansion, 8, 8)
    assert torch.equal(block(x), x) == zero


def test_convolutions_start_with_he_variance_by_fan_out():
    torch.manual_seed(0)
    weight = build("resnet18").layer3[0].conv1.weight.detach()
    assert weight.shape == (256, 128, 3, 3)
    assert float(weight.std()) == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stem": "smal"}, r"model\.stem='smal' is not one of auto, imagenet, small"),
        ({"stem": None}, r"model\.stem=None is not one of"),
        ({"stem": []}, r"model\.stem=\[\] is not one of"),
        ({"zero_init_residual": "yes"}, r"model\.zero_init_residual='yes' is not true or false"),
        ({"zero_init_residual": 1}, r"model\.zero_init_residual=1 is not true or false"),
    ],
)
def test_bad_options_are_config_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        build("resnet18", **options)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in ("resnet101", "resnet152") else ()) for n in PARAMETERS],
)
def test_the_recipe_trains_each_depth_on_digits(name):
    recipe = load_recipe(config_of(model=name))
    batch = recipe.train_transform(recipe.train.select(torch.arange(4)))
    network = recipe.build_model()
    loss = recipe.loss(network, batch)
    loss.sum.backward()
    assert torch.isfinite(loss.sum)
    assert loss.count == 4
    assert all(torch.isfinite(parameter.grad).all() for parameter in network.parameters())


def test_channels_last_gives_the_same_logits():
    torch.manual_seed(0)
    network = build("resnet18", num_classes=10, image_size=32).eval()
    images = torch.randn(2, 3, 32, 32)
    expected = network(images)
    result = network.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    assert torch.allclose(result, expected, atol=1e-4)
