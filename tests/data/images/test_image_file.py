import io
import math
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from launcher.data.images.image_file import Region, center_crop, random_resized_crop, read_crop
from launcher.errors import DataError
from tests.data.images.photographs import ORIENTATION, QUARTERS, corner_colours, corners, encoded

WHOLE = center_crop(1.0)
KINDS = (
    *(
        "grey",
        "bits",
        "palette",
        "transparent palette",
        "alpha",
        "grey and alpha",
        "16 bits",
        "16 bits in TIFF",
    ),
    *("CMYK", "1 x 1", "tall", "wide", "GIF", "WEBP"),
)


def exif(orientation):
    data = Image.Exif()
    data[ORIENTATION] = orientation
    return data


def lying(orientation):
    """The image that `orientation` turns upright: the inverse of what a viewer does."""
    inverse = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    return corners() if inverse is None else corners().transpose(inverse)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_come_out_upright(orientation, kind):
    content = encoded(lying(orientation), kind, exif=exif(orientation))
    assert corner_colours(read_crop(content, "it", WHOLE, 20)) == QUARTERS


def test_a_large_rotated_jpeg_is_decoded_smaller_and_cut_at_the_same_place():
    content = encoded(lying(6).resize((480, 640)), "JPEG", exif=exif(6), quality=95)
    assert corner_colours(read_crop(content, "it", WHOLE, 24)) == QUARTERS


def grey16(value):
    return Image.fromarray(np.full((9, 7), value, np.uint16))


def palette_with_transparency():
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    return encoded(image, transparency=b"\x00\xff")


@pytest.mark.parametrize(
    ("content", "colour"),
    [
        (encoded(Image.new("L", (8, 8), 77)), (77, 77, 77)),
        (encoded(Image.new("1", (8, 8), 1)), (255, 255, 255)),
        (encoded(Image.new("RGB", (8, 8), (10, 200, 30)).quantize(4)), (10, 200, 30)),
        (palette_with_transparency(), (10, 200, 30)),
        (encoded(Image.new("RGBA", (8, 8), (10, 200, 30, 0))), (10, 200, 30)),
        (encoded(Image.new("LA", (8, 8), (77, 9))), (77, 77, 77)),
        (encoded(grey16(77 * 256)), (77, 77, 77)),
        (encoded(grey16(77 * 256), "TIFF"), (77, 77, 77)),
        (encoded(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "JPEG", quality=100), (0, 255, 255)),
        (encoded(Image.new("RGB", (1, 1), (10, 200, 30))), (10, 200, 30)),
        (encoded(Image.new("RGB", (1, 300), (10, 200, 30))), (10, 200, 30)),
        (encoded(Image.new("RGB", (300, 2), (10, 200, 30)), "BMP"), (10, 200, 30)),
        (encoded(Image.new("RGB", (9, 9), (10, 200, 30)), "GIF"), (10, 200, 30)),
        (encoded(Image.new("RGB", (9, 9), (10, 200, 30)), "WEBP", lossless=True), (10, 200, 30)),
    ],
    ids=KINDS,
)
def test_all_kinds_come_out_as_rgb(content, colour):
    pixels = read_crop(content, "it", WHOLE, 5)
    assert (pixels.shape, pixels.dtype) == ((3, 5, 5), np.uint8)
    assert np.abs(pixels.transpose(1, 2, 0).astype(int) - colour).max() <= 2


@pytest.mark.parametrize(
    ("values", "kind"),
    [([0, 255], np.int32), ([-1, 65535], np.int32), ([0, 1 << 16], np.int32)],
)
def test_integers_of_another_range_than_16_bits_are_refused(values, kind):
    content = encoded(Image.fromarray(np.array([values], kind)), "TIFF")
    with pytest.raises(DataError, match=rf"go from {values[0]} to {values[1]}, where black and white are 0"):
        read_crop(content, "it", WHOLE, 5)


@pytest.mark.parametrize("value", [0, 255])
def test_a_dark_image_of_16_bits_is_black(value):
    assert not read_crop(encoded(grey16(value)), "it", WHOLE, 5).any()


def bomb():
    """A PNG that says it has 400 million pixels."""
    content = bytearray(encoded(Image.new("L", (8, 8))))
    content[16:24] = (20000).to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(bytes(content[12:29])).to_bytes(4, "big")
    return bytes(content)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not an image",
        b"\xff\xd8\xff\xe0 no",
        encoded(corners(300, 300), "JPEG")[:1500],
        encoded(corners(300, 300), "PNG")[:200],
        bomb(),
        encoded(Image.new("F", (8, 8)), "TIFF"),
    ],
    ids=["empty", "text", "jpeg head", "half a jpeg", "half a png", "bomb", "floats"],
)
def test_what_cannot_be_read_is_named(content):
    with pytest.raises(DataError, match=r"^dog/7\.jpg cannot be read as an image: .+"):
        read_crop(content, "dog/7.jpg", WHOLE, 5)


def test_damage_anywhere_is_a_data_error_or_an_image():
    generator = np.random.default_rng(0)
    whole = {kind: encoded(corners(), kind) for kind in ("JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP")}
    failures = 0
    for trial in range(240):
        content = bytearray(list(whole.values())[trial % len(whole)])
        for place in generator.integers(0, min(len(content), 200), 8):
            content[place] = generator.integers(256)
        try:
            read_crop(bytes(content), "it", WHOLE, 5)
        except DataError:
            failures += 1
    assert failures > 20


def test_the_centre_is_that_of_a_resize_and_a_centre_crop():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8))
    image = image.resize((60, 45)).resize((400, 300))  # without detail finer than the filters
    ours = read_crop(encoded(image), "it", center_crop(224 / 256), 224)
    resized = image.resize((341, 256), Image.Resampling.BILINEAR)
    theirs = np.asarray(resized.crop((58, 16, 58 + 224, 16 + 224))).transpose(2, 0, 1)
    assert np.abs(ours.astype(int) - theirs).mean() < 1.5


def test_a_region_is_cut_where_it_was_chosen():
    file = io.BytesIO(encoded(corners(64, 48)))
    region = Region(0, 0, 16, 15)
    pixels = read_crop(file.getvalue(), "it", lambda width, height: region, 6)
    assert (QUARTERS[0][0] == pixels.reshape(3, -1).T).all()


@pytest.mark.parametrize(("width", "height"), [(64, 48), (1, 1), (1000, 3), (3, 1000), (7, 7)])
def test_regions_lie_within_the_image_and_keep_area_and_ratio(width, height):
    torch.manual_seed(0)
    for _ in range(300):
        region = random_resized_crop(width, height, 0.08)
        assert 0 <= region.left <= width - region.width
        assert 0 <= region.top <= height - region.height
        if min(width, height) > 40:
            assert 3 / 4 * 0.9 <= region.width / region.height <= 4 / 3 * 1.1
            assert region.width * region.height >= 0.08 * width * height * 0.9


def torchvision_region(height, width, scale, ratio):
    """RandomResizedCrop.get_params of torchvision 0.24, copied: (top, left, height, width)."""
    area = height * width
    log_ratio = torch.log(torch.tensor(ratio))
    for _ in range(10):
        target_area = area * torch.empty(1).uniform_(scale[0], scale[1]).item()
        aspect_ratio = torch.exp(torch.empty(1).uniform_(log_ratio[0], log_ratio[1])).item()
        w = round(math.sqrt(target_area * aspect_ratio))
        h = round(math.sqrt(target_area / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            i = torch.randint(0, height - h + 1, size=(1,)).item()
            j = torch.randint(0, width - w + 1, size=(1,)).item()
            return i, j, h, w
    in_ratio = float(width) / float(height)
    if in_ratio < min(ratio):
        w, h = width, round(width / min(ratio))
    elif in_ratio > max(ratio):
        h, w = height, round(height * max(ratio))
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("width", "height"), [(500, 375), (256, 256), (900, 100), (100, 900)])
def test_regions_are_distributed_as_torchvisions(width, height):
    torch.manual_seed(0)
    count = 1500
    theirs = torch.tensor(
        [torchvision_region(height, width, (0.08, 1), (3 / 4, 4 / 3)) for _ in range(count)]
    ).float()
    ours = torch.tensor([random_resized_crop(width, height, 0.08) for _ in range(count)]).float()[
        :, [1, 0, 3, 2]
    ]
    spread = theirs.std(dim=0).clamp_min(1)
    assert ((ours.mean(dim=0) - theirs.mean(dim=0)).abs() < 5 * spread / math.sqrt(count)).all()
    assert torch.allclose(ours.std(dim=0), theirs.std(dim=0), rtol=0.12, atol=0.5)
