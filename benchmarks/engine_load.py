"""What the load driver sends: prompts of which no two begin alike, pictures that occur once."""

import base64
import io
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

# Common words: about a token each with most tokenizers of English.
_WORDS = (
    "about above after again almost alone along also always animal answer apple area around ask "
    "away back ball bank because bed before begin behind below best better between big bird black "
    "blue boat body book both box boy bread bring brown build bus call car care carry cat chair "
    "change child city class clear close cloud cold colour come country cover cut dark day deep "
    "dog door down draw dream drive dry each early earth east eat egg end enough even evening ever "
    "every eye face fact fall family far farm fast father feel field fire first fish five floor "
    "flower food foot force form four free friend from full game garden girl give glass good grass "
    "great green ground group grow hand happy hard head hear heart heat high hill home horse hot "
    "hour house ice idea island just keep kind king know lake land large last late learn leave "
    "left letter life light line list little live long look love low make man many map mark may "
    "mean milk mind money month moon more morning most mother mountain move much music name near"
)
WORDS = _WORDS.split()
# The two tokens around a turn and the template's own are few; the rest is words.
PROMPT_WORDS = 64
_PICTURE_SIDE = 336
# A smooth picture with detail, as a photograph is, rather than noise that no file format packs.
_COARSE_SIDE = 24
_DETAIL = 24
_JPEG_QUALITY = 85


@dataclass(frozen=True)
class Ask:
    """One kind of chat request.

    Attributes:
        model: the name under which the model is served.
        pictures: unique pictures in front of the text.
        new_tokens: exact length of the answer; the end-of-sequence token is ignored.
    """

    model: str
    pictures: int = 0
    new_tokens: int = 64


def bodies(ask: Ask, count: int, seed: str) -> list[bytes]:
    """`count` request bodies; equal only where `seed`, `ask` and place are."""
    return [_body(ask, f"{seed}/{ask.pictures}/{place}") for place in range(count)]


def prompt(seed: str) -> str:
    """Words in an order of the seed's own, so that no prefix is another prompt's too."""
    stream = random.Random(seed)
    return " ".join(stream.choice(WORDS) for _ in range(PROMPT_WORDS))


def picture(seed: str) -> bytes:
    """A JPEG file of 336 by 336 pixels that no other seed gives."""
    stream = np.random.default_rng(list(seed.encode()))
    coarse = stream.integers(0, 256, (_COARSE_SIDE, _COARSE_SIDE, 3), np.uint8)
    side = (_PICTURE_SIDE, _PICTURE_SIDE)
    smooth = np.asarray(Image.fromarray(coarse).resize(side, Image.Resampling.BICUBIC), np.int16)
    detail = stream.integers(-_DETAIL, _DETAIL + 1, (*side, 1), np.int16)
    file = io.BytesIO()
    pixels = np.clip(smooth + detail, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(file, "JPEG", quality=_JPEG_QUALITY)
    return file.getvalue()


def _body(ask: Ask, seed: str) -> bytes:
    request = {
        "model": ask.model,
        "messages": [{"role": "user", "content": list(_content(ask, seed))}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": ask.new_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return json.dumps(request).encode()


def _content(ask: Ask, seed: str) -> Iterator[dict[str, object]]:
    for number in range(ask.pictures):
        file = base64.b64encode(picture(f"{seed}/{number}")).decode()
        yield {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{file}"}}
    yield {"type": "text", "text": prompt(seed)}
