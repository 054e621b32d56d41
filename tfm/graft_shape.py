"""The shape that a family is widened to: where the source's heads and layers lie in it, and what cannot hold it.

Works on the contents of config.json files and needs no torch, so that a suite is refused before anything is loaded.
`tfm/graft.py` fills the shape with weights.
"""

import functools
import math
from collections.abc import Iterator, Sequence

PARTS = ("target", "drafter", "weaver")
# what a shape may give of a part; what it leaves out, and every other key, is the source's
SIZES = {
    "target": (
        "vocab_size",
        "hidden_size",  # the drafter's hidden_size and the weaver's d_model and d_embed follow it
        "intermediate_size",
        "num_hidden_layers",
        "full_attention_interval",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
    ),
    "drafter": (
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "layer_types",
        "target_layer_ids",
    ),
    "weaver": ("d_rank", "num_heads", "mlp_dim", "num_layers", "K", "candidate_pool_size"),
}
MULTIPLES = {"target": ("hidden_size",), "weaver": ("d_rank",)}
AT_LEAST = {
    "target": ("vocab_size", "intermediate_size"),
    "drafter": ("intermediate_size",),
    "weaver": ("num_heads", "mlp_dim", "K"),
}
EQUAL = {"target": ("head_dim", "linear_key_head_dim", "linear_value_head_dim"), "drafter": ("head_dim",)}
GROUPED = {  # heads that share others
    "target": (("num_attention_heads", "num_key_value_heads"), ("linear_num_value_heads", "linear_num_key_heads")),
    "drafter": (("num_attention_heads", "num_key_value_heads"),),
    "weaver": (),
}


def shares(copies: int) -> list[float]:
    """Return `copies` powers of two that add up to 1: what each copy of a repeated vector counts when it is read.

    A weight times a power of two has the same significant bits, so every type that holds the weight holds its shares.
    """
    halvings = copies.bit_length() - 1
    halved = copies - 2**halvings  # this many of the 2^halvings equal shares are split once more
    return [2.0**-halvings] * (2**halvings - halved) + [2.0 ** -(halvings + 1)] * (2 * halved)


def place_heads(source: tuple[int, int], wide: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Return where the `many` heads and, for every head of the `few`, which source head lies: (places, owners).

    `source` and `wide` are (many, few); head i of the many uses head i // (many / few) of the few. places[i] is the
    wide place of source head i; owners[j] is the source head that wide head j of the few copies, for the first ones. A
    group too large for a wide group is spread over several, each with a copy of the head that it shares.
    """
    group, room = source[0] // source[1], wide[0] // wide[1]
    copies = math.ceil(group / room)
    places = [(head // group * copies + head % group // room) * room + head % group % room for head in range(source[0])]
    return places, [few for few in range(source[1]) for _ in range(copies)]


def spread_layers(
    source: Sequence[str], wide: Sequence[str], taps: Sequence[tuple[int, int]] = ()
) -> tuple[int, ...] | None:
    """Return a wide layer for every source layer, evenly spread: of the same kind, in order; None where there is none.

    `taps` are pairs (source layer, wide layer): what is read after the one must be what is read after the other.
    """
    stride = len(wide) / len(source)

    def fits(layer: int, place: int) -> bool:
        same_side = all((layer <= tap) == (place <= wide_tap) for tap, wide_tap in taps)
        return source[layer] == wide[place] and same_side

    @functools.cache
    def best(layer: int, first: int) -> tuple[float, tuple[int, ...]]:
        if layer == len(source):
            return 0.0, ()
        found = (math.inf, ())
        for place in range(first, len(wide)):
            if fits(layer, place):
                cost, rest = best(layer + 1, place + 1)
                found = min(found, (cost + (place + 0.5 - (layer + 0.5) * stride) ** 2, (place, *rest)))
        return found

    cost, places = best(0, 0)
    return places if cost < math.inf else None


def wide_layer_types(sizes: dict, source: dict) -> list[str]:
    """Return the kinds of the wide target's layers: the source's, or full attention once in every interval."""
    if "num_hidden_layers" not in sizes:
        return list(source["layer_types"])
    if "linear_attention" not in source["layer_types"]:
        return ["full_attention"] * sizes["num_hidden_layers"]
    every = sizes.get("full_attention_interval", 4)
    return [("linear_attention", "full_attention")[(i + 1) % every == 0] for i in range(sizes["num_hidden_layers"])]


def problems(sources: dict[str, dict], shape: dict) -> list[str]:
    """Return every reason why a shape cannot hold its source, each with key, value, allowed values and remedy.

    `sources` are the config.json contents by part, `shape` the sizes by part, with `layers`: the wide layer of every
    source layer. A part that one of them lacks is not looked at, so that a suite is listed without its weights.
    """
    flat = {part: _flat(fields) for part, fields in sources.items() if fields and shape.get(part) is not None}
    for part in (part for part in flat if part != "weaver" and not flat[part].get("layer_types")):
        return [f"graft.{part}: the source's config.json names no layer_types; take a family trained here"]
    found = [problem for part in flat for problem in _size_problems(part, flat[part], shape[part])]
    found += [problem for part in flat for problem in _head_problems(part, flat[part], shape[part])]
    found += [problem for part in flat for problem in _layer_problems(part, flat[part], shape[part])]
    if not found and {"target", "drafter"} <= set(flat):
        places = shape["target"].get("layers", list(range(len(flat["target"]["layer_types"]))))
        found += _tap_problems(flat["drafter"], shape["drafter"], places)
    return found


def check(sources: dict[str, dict], shape: dict) -> None:
    """Raise ValueError with every problem of a shape."""
    if found := problems(sources, shape):
        raise ValueError("\n".join(found))


def _flat(fields: dict) -> dict:
    return {**fields, **(fields.get("text_config") or {}), **(fields.get("dflash_config") or {})}


def _refused(part: str, key: str, value, allowed: str, remedy: str) -> str:
    return f"graft.{part}.{key}: {value!r} is not allowed (allowed: {allowed}); {remedy}"


def _size_problems(part: str, source: dict, sizes: dict) -> Iterator[str]:
    known = (*SIZES[part], "layers")
    for key in sorted(set(sizes) - set(known)):
        yield f"graft.{part}.{key}: unknown key; allowed keys: {', '.join(known)}"
    for key in (key for key in MULTIPLES.get(part, ()) if key in sizes):
        if sizes[key] % source[key]:
            remedy = "the vector is repeated, which leaves its norm as it is: take a multiple"
            yield _refused(part, key, sizes[key], f"a multiple of the source's {source[key]}", remedy)
    for key in (key for key in AT_LEAST[part] if key in sizes):
        if sizes[key] < source[key]:
            yield _refused(part, key, sizes[key], f"{source[key]} or more, the source's", f"raise {key}")
    for key in (key for key in EQUAL.get(part, ()) if key in sizes):
        if sizes[key] != source.get(key):
            remedy = f"a head's norm, angles and scale depend on its width: leave {key} out, or take another source"
            yield _refused(part, key, sizes[key], f"{source.get(key)}, the source's", remedy)
    if part == "weaver":
        heads, rank = (sizes.get(key, source[key]) for key in ("num_heads", "d_rank"))
        width = source["d_rank"] // source["num_heads"]
        if rank != heads * width:
            remedy = "a head's scale depends on its width: change num_heads or d_rank"
            yield _refused(part, "num_heads", heads, f"d_rank {rank} / {width}, the source's head width", remedy)


def _head_problems(part: str, source: dict, sizes: dict) -> Iterator[str]:
    for many, few in (keys for keys in GROUPED[part] if source.get(keys[0])):
        old, new = ((fields[many], fields[few]) for fields in (source, {**source, **sizes}))
        if new[0] % new[1]:
            yield _refused(part, few, new[1], f"a divisor of {many}, {new[0]}", f"change {few} or {many}")
            continue
        needed = len(place_heads(old, new)[1])
        if needed > new[1]:
            why = f"{old[0]} {many} in groups of {old[0] // old[1]}, {new[0] // new[1]} to a wide group"
            yield _refused(part, few, new[1], f"{needed} or more, for the source's {why}", f"raise {few} or {many}")


def _layer_problems(part: str, source: dict, sizes: dict) -> Iterator[str]:
    old, new = _kinds(part, source, {}), _kinds(part, source, sizes)
    layers = sizes.get("layers", list(range(len(old))))
    ascends = all(a < b for a, b in zip(layers, layers[1:], strict=False))
    if len(layers) != len(old) or not ascends or not all(0 <= layer < len(new) for layer in layers):
        allowed = f"one wide layer for each of the source's {len(old)}, ascending, from 0 to {len(new) - 1}"
        yield _refused(part, "layers", layers, allowed, "name the layers that hold the source's")
        return
    wrong = [f"{place} is {new[place]}" for kind, place in zip(old, layers, strict=True) if new[place] != kind]
    if wrong:
        remedy = f"{', '.join(wrong)}: choose other layers"
        yield _refused(part, "layers", layers, f"layers of the kinds {', '.join(old)}, in this order", remedy)


def _kinds(part: str, source: dict, sizes: dict) -> list[str]:
    if part == "target":
        return wide_layer_types(sizes, source)
    if part == "drafter":
        return list(sizes.get("layer_types", source["layer_types"]))
    return ["block"] * sizes.get("num_layers", source["num_layers"])


def _tap_problems(source: dict, sizes: dict, places: list[int]) -> Iterator[str]:
    old, key = source["target_layer_ids"], "target_layer_ids"
    new = sizes.get(key, old)
    if len(old) != len(new):
        remedy = "fc reads one tap after the other: give one for each of the source's"
        yield _refused("drafter", key, new, f"{len(old)} layers, as many as the source's drafter reads", remedy)
        return
    for tap, wide_tap in zip(old, new, strict=True):
        seen = sum(place <= wide_tap for place in places)
        if seen != tap + 1:
            allowed = f"a layer after which the source's first {tap + 1} layers are done, and no more"
            remedy = f"{seen} are done after layer {wide_tap}: change it, or graft.target.layers"
            yield _refused("drafter", key, wide_tap, allowed, remedy)
