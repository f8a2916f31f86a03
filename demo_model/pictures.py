"""Draws the synthetic pictures that the demo model learns from and is examined on.

A picture is drawn from a `Scene`, and a scene from a split name and a seed, so every picture is
reproducible. The two splits are disjoint three times over:

* the random stream is keyed by split and seed, so no seed of one split gives a scene of the other;
* a layout is the tuple of lattice cells that the objects' centres fall in, and its `layout_key`
  decides which split may use it, so no held-out layout was seen in training;
* one colour of every shape, digit and word is reserved for the held-out split.
"""

import math
import random
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

Split = Literal["train", "held-out"]
Kind = Literal["shapes", "digit", "word"]
Rgb = tuple[int, int, int]
Point = tuple[float, float]

CANVAS = 224
LATTICE = 16
LAYOUT_GROUPS = 5
CLEARANCE = 6
SCATTER_TRIES = 200

COLOURS: dict[str, Rgb] = {
    "red": (215, 30, 35),
    "orange": (250, 140, 20),
    "yellow": (245, 225, 40),
    "green": (40, 160, 60),
    "cyan": (50, 205, 220),
    "blue": (35, 65, 205),
    "purple": (125, 45, 165),
    "pink": (250, 130, 185),
}
SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross")
DIGITS = tuple("0123456789")
WORDS = ("cat", "dog", "sun", "sea", "tree", "fish", "bird", "book", "hat", "cup", "key", "moon")
COUNTS = ("one", "two", "three", "four", "five")
POSITIONS: dict[str, Point] = {
    "left": (0.24, 0.5),
    "right": (0.76, 0.5),
    "top": (0.5, 0.24),
    "bottom": (0.5, 0.76),
    "centre": (0.5, 0.5),
}
CONTENTS: dict[Kind, tuple[str, ...]] = {"shapes": SHAPES, "digit": DIGITS, "word": WORDS}


@dataclass(frozen=True)
class Placement:
    """One object: centre and half extent in canvas pixels, turn in degrees."""

    centre: Point
    radius: float
    turn: float


@dataclass(frozen=True)
class Scene:
    """What a picture shows. `text`: `content` as drawn; `position`: empty for several objects."""

    kind: Kind
    colour: str
    content: str
    position: str
    placements: tuple[Placement, ...]
    text: str
    stroke: int
    ink: Rgb
    background: Rgb

    @property
    def count(self) -> str:
        return COUNTS[len(self.placements) - 1]


def layout(scene: Scene) -> tuple[tuple[int, int], ...]:
    """The lattice cells of the objects' centres, sorted."""
    step = CANVAS / LATTICE
    return tuple(
        sorted((int(p.centre[0] / step), int(p.centre[1] / step)) for p in scene.placements)
    )


def layout_key(scene: Scene) -> int:
    """Group 0 of LAYOUT_GROUPS belongs to the held-out split, the others to training."""
    return sum(3 * x + y for x, y in layout(scene)) % LAYOUT_GROUPS


def is_reserved(kind: Kind, content: str, colour: str) -> bool:
    """True for the colour of this content that training never shows."""
    return (list(COLOURS).index(colour) - CONTENTS[kind].index(content)) % len(COLOURS) == 0


def allowed_in(split: Split, scene: Scene) -> bool:
    if split == "held-out":
        return layout_key(scene) == 0
    return layout_key(scene) != 0 and not is_reserved(scene.kind, scene.content, scene.colour)


def sample_scene(split: Split, seed: int) -> Scene:
    """The scene of this split and seed: same arguments, same scene, on every machine."""
    stream = random.Random(f"chiasm demo picture/{split}/{seed}")
    while True:
        scene = _propose(stream)
        if allowed_in(split, scene):
            return scene


def _propose(stream: random.Random) -> Scene:
    kind: Kind = stream.choice(("shapes", "shapes", "digit", "word"))
    content = stream.choice(CONTENTS[kind])
    colour = stream.choice(list(COLOURS))
    position, placements = _place(stream, kind)
    return Scene(
        kind=kind,
        colour=colour,
        content=content,
        position=position,
        placements=placements,
        text=stream.choice((content, content.upper())),
        stroke=stream.choice((1, 2, 3, 4)),
        ink=_jitter(stream, COLOURS[colour], 14),
        background=_background(stream),
    )


def _place(stream: random.Random, kind: Kind) -> tuple[str, tuple[Placement, ...]]:
    if kind == "word":
        centre = (CANVAS * stream.uniform(0.44, 0.56), CANVAS * stream.uniform(0.25, 0.75))
        return "", (Placement(centre, stream.uniform(76, 94), stream.uniform(-5, 5)),)
    count = stream.randint(1, len(COUNTS)) if kind == "shapes" else 1
    if count > 1:
        return "", _scatter(stream, count)
    position = stream.choice(list(POSITIONS))
    return position, (_single(stream, POSITIONS[position]),)


def _single(stream: random.Random, zone: Point) -> Placement:
    centre = (
        CANVAS * (zone[0] + stream.uniform(-0.055, 0.055)),
        CANVAS * (zone[1] + stream.uniform(-0.055, 0.055)),
    )
    return Placement(centre, stream.uniform(36, 54), stream.uniform(-8, 8))


def _scatter(stream: random.Random, count: int) -> tuple[Placement, ...]:
    placed: list[Placement] = []
    tries = 0
    while len(placed) < count:
        radius = stream.uniform(28, 38)
        edge = radius + 3
        centre = (stream.uniform(edge, CANVAS - edge), stream.uniform(edge, CANVAS - edge))
        if all(_apart(centre, radius, other) for other in placed):
            placed.append(Placement(centre, radius, stream.uniform(-8, 8)))
        tries += 1
        if tries > SCATTER_TRIES:
            placed, tries = [], 0
    return tuple(placed)


def _apart(centre: Point, radius: float, other: Placement) -> bool:
    return math.dist(centre, other.centre) > radius + other.radius + CLEARANCE


def _jitter(stream: random.Random, colour: Rgb, spread: int) -> Rgb:
    red, green, blue = (min(255, max(0, c + stream.randint(-spread, spread))) for c in colour)
    return red, green, blue


def _background(stream: random.Random) -> Rgb:
    """White, near white, grey or near black: never a colour that could be asked about."""
    grey = stream.choice((255, stream.randint(225, 255), stream.randint(0, 35)))
    return (255, 255, 255) if grey == 255 else _jitter(stream, (grey, grey, grey), 6)


def draw(scene: Scene) -> Image.Image:
    """The picture of a scene: RGB, CANVAS by CANVAS pixels."""
    image = Image.new("RGB", (CANVAS, CANVAS), scene.background)
    for placement in scene.placements:
        if scene.kind == "shapes":
            _draw_shape(image, scene, placement)
        else:
            _draw_text(image, scene, placement)
    return image


def picture(split: Split, seed: int) -> Image.Image:
    return draw(sample_scene(split, seed))


def _draw_shape(image: Image.Image, scene: Scene, placement: Placement) -> None:
    pen = ImageDraw.Draw(image)
    if scene.content == "circle":
        (x, y), r = placement.centre, placement.radius * 0.92
        pen.ellipse((x - r, y - r, x + r, y + r), fill=scene.ink)
        return
    pen.polygon([_turned(point, placement) for point in OUTLINES[scene.content]], fill=scene.ink)


def _turned(point: Point, placement: Placement) -> Point:
    angle = math.radians(placement.turn)
    x, y = point
    return (
        placement.centre[0] + placement.radius * (x * math.cos(angle) - y * math.sin(angle)),
        placement.centre[1] + placement.radius * (x * math.sin(angle) + y * math.cos(angle)),
    )


def _star() -> tuple[Point, ...]:
    corners = []
    for i in range(10):
        reach, angle = (1.08, 0.45)[i % 2], math.radians(36 * i - 90)
        corners.append((reach * math.cos(angle), reach * math.sin(angle)))
    return tuple(corners)


def _cross(arm: float = 0.34, reach: float = 0.98) -> tuple[Point, ...]:
    quarter = ((arm, -reach), (arm, -arm), (reach, -arm))
    turned = [quarter]
    for _ in range(3):
        turned.append(tuple((-y, x) for x, y in turned[-1]))  # type: ignore[arg-type]
    return tuple(point for corner in turned for point in corner)


OUTLINES: dict[str, tuple[Point, ...]] = {
    "square": ((-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)),
    "triangle": ((0.0, -1.0), (0.95, 0.8), (-0.95, 0.8)),
    "diamond": ((0.0, -1.1), (0.8, 0.0), (0.0, 1.1), (-0.8, 0.0)),
    "star": _star(),
    "cross": _cross(),
}


def _draw_text(image: Image.Image, scene: Scene, placement: Placement) -> None:
    """Pastes the text as a mask: its ink, turned, is centred, its longer side 2 * radius."""
    font = ImageFont.load_default(size=96)
    left, top, right, bottom = font.getbbox(scene.text, stroke_width=scene.stroke)
    mask = Image.new("L", (math.ceil(right - left) + 8, math.ceil(bottom - top) + 8))
    ImageDraw.Draw(mask).text(
        (4 - left, 4 - top), scene.text, fill=255, font=font, stroke_width=scene.stroke
    )
    scale = 2 * placement.radius / max(mask.size)
    size = (max(1, round(mask.width * scale)), max(1, round(mask.height * scale)))
    turned = mask.resize(size, Image.Resampling.BILINEAR).rotate(
        -placement.turn, Image.Resampling.BILINEAR, expand=True
    )
    corner = (
        round(placement.centre[0] - turned.width / 2),
        round(placement.centre[1] - turned.height / 2),
    )
    image.paste(scene.ink, corner, turned)
