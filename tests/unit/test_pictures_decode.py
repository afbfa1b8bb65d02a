"""Bytes to upright RGB: every kind of file that people send, and those that nobody should."""

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from text_generation_inference.errors import ValidationError
from text_generation_inference.pictures.data_uri import decode_base64, parse_data_uri
from text_generation_inference.pictures.decode import decode

MAX = 10_000_000
ORIENTATION = 0x0112


def gradient(width: int, height: int) -> np.ndarray:
    """With one corner of another colour, so that no turn or flip leaves it as it is."""
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack(
        [rows * 255 // max(height - 1, 1), columns * 255 // max(width - 1, 1), (rows + columns) % 256], -1
    )
    pixels[: height // 3, : width // 4] = (250, 20, 90)
    return pixels.astype(np.uint8)


def save(image: Image.Image | np.ndarray, format: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, format, **options)
    return file.getvalue()


def read(data: bytes, format: str | None = None, max_pixels: int = MAX) -> np.ndarray:
    image = decode(data, format, max_pixels)
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("format", ["PNG", "GIF", "WEBP", "TIFF", "BMP", "JPEG"])
def test_formats(format: str) -> None:
    pixels = np.zeros((6, 9, 3), np.uint8)
    pixels[:3] = (255, 0, 0)
    options = {"lossless": True} if format == "WEBP" else {"quality": 100, "subsampling": 0} if format == "JPEG" else {}
    found = read(save(pixels, format, **options)).astype(int)
    assert found.shape == (6, 9, 3)
    assert np.abs(found - pixels).max() <= (40 if format == "JPEG" else 0)
    assert np.array_equal(read(save(pixels, format, **options), format), found)


@pytest.mark.parametrize("format", ["PPM", "ICO", "PCX", "TGA", "SGI", "EPS", "PDF", "JPEG2000", "AVIF", "DDS", "XBM"])
def test_other_formats_are_not_tried(format: str) -> None:
    image = Image.new("1" if format == "XBM" else "RGB", (16, 16))
    with pytest.raises(ValidationError, match="^invalid image: it is not PNG, JPEG, GIF, WebP, TIFF or BMP$"):
        read(save(image, format))


@pytest.mark.parametrize(
    ("width", "height"), [(1, 1), (1, 7), (7, 1), (3, 3), (3, 1), (4, 3), (20, 20), (27, 29), (1, 1000), (1000, 1)]
)
def test_sizes_and_channel_order(width: int, height: int) -> None:
    """No shape is taken for another: (1, 1, 3) and (3, 3, 3) least of all."""
    pixels = gradient(width, height)
    assert np.array_equal(read(save(pixels)), pixels)


TRANSPOSED: dict[int, Callable[[np.ndarray], np.ndarray]] = {  # how an upright picture is stored
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, -1),
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_orientations(orientation: int, format: str) -> None:
    upright = gradient(12, 8).repeat(8, 0).repeat(8, 1)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    options = {"lossless": True} if format == "WEBP" else {"quality": 95} if format == "JPEG" else {}
    stored = np.ascontiguousarray(TRANSPOSED[orientation](upright))
    found = read(save(stored, format, exif=exif, **options)).astype(int)
    assert found.shape == upright.shape
    assert np.abs(found - upright).mean() <= (6 if format == "JPEG" else 0)


def test_damaged_notes_do_no_harm() -> None:
    upright = gradient(12, 8)
    assert np.array_equal(read(save(upright, exif=b"Exif\0\0II*\0\xff\xff\xff\xff")), upright)
    assert np.array_equal(read(save(upright, exif=b"Exif\0\0nonsense")), upright)


def test_transparency_is_put_on_white() -> None:
    """`tests/models/test_picture_modes.py` compares with `transformers`."""
    half = Image.new("RGBA", (3, 3), (200, 0, 100, 128))
    assert np.abs(read(save(half)).astype(int) - (227, 127, 177)).max() <= 1
    assert (read(save(Image.new("RGBA", (3, 3), (9, 9, 9, 0)))) == 255).all()  # what cannot be seen is white
    assert (read(save(Image.new("LA", (3, 3), (9, 0)))) == 255).all()
    keyed = read(save(gradient(12, 8), transparency=(250, 20, 90)))  # one colour of an RGB picture
    assert (keyed[0, 0] == 255).all()
    assert np.array_equal(keyed[-1], gradient(12, 8)[-1])
    indexed = Image.new("P", (3, 3), 1)
    indexed.putpalette([255, 0, 0, 0, 255, 0])
    assert (read(save(indexed)) == (0, 255, 0)).all()
    assert (read(save(indexed, transparency=1)) == 255).all()
    assert (read(save(Image.new("1", (3, 3), 1))) == 255).all()
    assert (read(save(Image.new("L", (3, 3), 77))) == 77).all()


def test_cmyk() -> None:
    inks = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    for format in ("JPEG", "TIFF"):
        found = read(save(inks, format))
        assert found[4, 4, 0] > 200 and found[4, 4, 1] < 60, format


def test_16_bits() -> None:
    """Scaled, where Pillow cuts at 255 and leaves white."""
    values = (np.arange(12 * 8).reshape(8, 12) * 600).astype(np.uint16)
    for format in ("PNG", "TIFF"):
        found = read(save(values, format))
        assert np.array_equal(found, np.repeat((values >> 8).astype(np.uint8)[..., None], 3, -1)), format
    colours = png(2, 1, b"\0" + struct.pack(">6H", 0xFF00, 0x8000, 0x0100, 0, 0x1234, 0xFFFF), depth=16)
    assert read(colours).tolist() == [[[255, 128, 1], [0, 0x12, 255]]]


def test_values_that_are_no_pixels() -> None:
    with pytest.raises(ValidationError, match="no whole numbers"):
        read(save(Image.new("F", (2, 2)), "TIFF"))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_of_several(format: str) -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if format == "WEBP" else {}
    found = read(save(frames[0], format, save_all=True, append_images=frames[1:], **options))
    assert (found == (255, 0, 0)).all()


def test_two_pictures_in_a_jpeg() -> None:
    first, second = (Image.new("RGB", (16, 16), colour) for colour in ("red", "blue"))
    data = save(first, "MPO", save_all=True, append_images=[second])
    for format in (None, "JPEG"):
        assert read(data, format)[0, 0, 0] > 200


def png(width: int, height: int, rows: bytes = b"", depth: int = 8) -> bytes:
    """By hand, so that it may lie."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def gif(width: int, height: int) -> bytes:
    return (
        b"GIF89a"
        + struct.pack("<HHBBB", width, height, 0x80, 0, 0)
        + bytes(6)
        + b","
        + struct.pack("<HHHHB", 0, 0, width, height, 0)
        + b"\x02\x02\x44\x01\x00;"
    )


def bmp(width: int, height: int) -> bytes:
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, *[0] * 6)


@pytest.mark.parametrize(
    "data", [png(30000, 30000), png(2**31 - 1, 1), gif(65535, 65535), bmp(60000, 60000), png(5000, 2001)]
)
def test_bombs_are_refused_by_their_header(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("decoded before the size was checked"))
    with pytest.raises(ValidationError, match="^invalid image: it has more than the 10000000 pixels"):
        read(data)


@pytest.mark.parametrize("data", [png(0, 5), png(5, 0), bmp(0, 0), gif(0, 0)])
def test_pictures_without_pixels(data: bytes) -> None:
    with pytest.raises(ValidationError, match="^invalid image: "):
        read(data)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
@pytest.mark.parametrize("part", [0.5, 0.9])
def test_truncated_files(format: str, part: float) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    data = save(noise, format)
    with pytest.raises(ValidationError, match="^invalid image: it is (damaged or incomplete|not PNG)"):
        read(data[: int(len(data) * part)])


PNG = save(gradient(12, 8))
JPEG = save(gradient(12, 8), "JPEG")


@pytest.mark.parametrize(
    ("data", "format"),
    [
        (b"", None),
        (b"hello, I am a text that is called x.png", None),
        (b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", None),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run\n", None),
        (b"%PDF-1.7\n" + PNG, None),  # a document that carries a picture
        (b"PK\x03\x04" + PNG, None),
        (b"\x7fELF" + bytes(200), None),
        (b"\x00\x00\x00\x18ftypmp42" + bytes(200), None),  # a film
        (b"RIFF\xff\xff\xff\xffWEBPVP8X" + b"\xff" * 40, None),
        (b"\x89PNG\r\n\x1a\n" + b"\xff" * 100, None),
        (b"\xff\xd8\xff\xe0" + bytes(50), None),
        (b"II*\x00\x08\x00\x00\x00\xff\xff" + b"\xff" * 100, None),
        (b"GIF89a<script>alert(1)</script>", None),
        (JPEG, "PNG"),  # a type that is believed, and wrong
        (PNG, "JPEG"),
        (PNG, "TIFF"),
    ],
)
def test_what_is_no_picture(data: bytes, format: str | None) -> None:
    with pytest.raises(ValidationError) as refusal:
        read(data, format)
    assert str(refusal.value).startswith("invalid image: it ")
    assert "0x" not in str(refusal.value) and "object at" not in str(refusal.value)  # CVE-2026-22778


def test_polyglots_are_the_picture_they_begin_as() -> None:
    """What follows a picture is not looked at: an archive, a page, another picture."""
    for tail in (b"PK\x03\x04" + bytes(100), b"<html><script>x</script>", JPEG):
        assert np.array_equal(read(PNG + tail), gradient(12, 8))


def test_random_damage_never_gets_out() -> None:
    """Every byte of small files is changed in turn: a picture comes of it, or a refusal with fixed words."""
    rng = np.random.default_rng(1)
    for format in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"):
        data = save(gradient(7, 5), format)
        for place in range(0, len(data), max(1, len(data) // 150)):
            damaged = bytearray(data)
            damaged[place] ^= int(rng.integers(1, 256))
            try:
                assert read(bytes(damaged)).dtype == np.uint8
            except ValidationError as error:
                assert str(error).startswith("invalid image: it ")


# -- data URIs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "format"),
    [
        *(("data:image/png;base64", "PNG"), ("data:image/jpeg;base64", "JPEG"), ("data:image/jpg;base64", "JPEG")),
        *(("data:image/gif;base64", "GIF"), ("data:image/webp;base64", "WEBP"), ("data:image/tiff;base64", "TIFF")),
        *(("data:image/bmp;base64", None), ("data:application/octet-stream;base64", None), ("data:;base64", None)),
        *(("data:image/png;charset=x;base64", "PNG"), ("data:IMAGE/PNG;name=a b;Base64", "PNG")),
    ],
)
def test_data_uris(head: str, format: str | None) -> None:
    uri = parse_data_uri(head + ",QUJD")
    assert uri.format == format
    assert decode_base64(uri.data) == b"ABC"


@pytest.mark.parametrize(
    "source",
    [
        *("data:image/png,QUJD", "data:image/png;base64", "data:base64,QUJD", "data:image/png;base64;x,QUJD", "data:,"),
        *(
            "data:image/png;utf8,<svg/>",
            "data:" + "x" * 5000 + ";base64,QUJD",
            "ftp://x/y.png",
            "",
            "x" * 10**6,
            "\ud800",
        ),
    ],
)
def test_what_is_no_data_uri(source: str) -> None:
    with pytest.raises(ValidationError, match="^invalid image content: ") as refusal:
        parse_data_uri(source)
    assert len(str(refusal.value)) < 100


@pytest.mark.parametrize(
    ("data", "why"),
    [
        *(("QUJ-RA==", "Invalid symbol 45, offset 3."), ("QUJ_RA==", "Invalid symbol 95, offset 3.")),  # for URLs
        *(("QU\nJD", "Invalid symbol 10, offset 2."), ("QUJD é", "Invalid symbol 233, offset 5.")),
        *(("QUI", "Invalid padding"), ("QUJDRA=", "Invalid padding"), ("=QUJ", "Invalid padding")),
        *(("QUJDRA==QUJD", "Invalid padding"), ("A", "Invalid padding")),
        ("QU%2BD", "Invalid symbol 37, offset 2."),
    ],
)
def test_bad_base64(data: str, why: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        decode_base64(parse_data_uri(f"data:image/png;base64,{data}").data)
    assert str(refusal.value) == f"base64 encoding is invalid: {why}"
