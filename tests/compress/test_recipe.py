"""Recipes: every weight belongs to exactly one step, and whatever does not fit is named."""

import pytest

from triptych.compress.recipe import BUILTIN, Recipe, RecipeStep, load, resolve
from triptych.compress.rounding import Grid
from triptych.errors import ConfigError

DECODER = {
    **{
        f"layers.{i}.{name}": (64, 64) for i in (1, 12) for name in ("self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
    },
    "layers.1.input_layernorm": (64,),
}
SHAPES = {
    "vision": {"stem.conv": (8, 3, 3, 3), "stem.conv.bias": (8,)},
    "projector": {"fc": (64, 48)},
    "decoder": DECODER,
    "embedding": {"embed_tokens": (100, 64)},
}


def recipe(*steps: RecipeStep) -> Recipe:
    return Recipe(name="mine", steps=steps)


def decoder_only(*steps: RecipeStep):
    return resolve(recipe(*steps), {"decoder": DECODER})


@pytest.mark.parametrize("name", BUILTIN)
def test_every_builtin_gives_each_matrix_to_exactly_one_step(name):
    found = resolve(load(name), SHAPES)

    met = [(entry.step.part, weight) for entry in found for weight in entry.names]
    assert sorted(met) == sorted(
        (part, n) for part, own in SHAPES.items() for n, shape in own.items() if len(shape) > 1
    )


@pytest.mark.parametrize("name", BUILTIN)
def test_a_model_of_text_alone_has_no_eyes_and_that_is_no_error(name):
    found = resolve(load(name), {part: SHAPES[part] for part in ("decoder", "embedding")})

    assert [entry.step.part for entry in found] == ["decoder", "embedding"]


def test_modality_is_what_the_issue_says():
    steps = {step.part: step for step in BUILTIN["modality"].steps}

    assert (steps["vision"].bits, steps["vision"].activations) == (8, 8)
    assert (steps["projector"].bits, steps["projector"].group_size) == (4, 32)
    assert steps["decoder"].is_kept
    assert steps["embedding"].bits == 8


def test_names_are_whole_components_not_beginnings():
    first, rest = decoder_only(
        RecipeStep(part="decoder", weights=("layers.1",), bits=8), RecipeStep(part="decoder", but=("layers.1",), bits=4)
    )

    assert all(name.startswith("layers.1.") for name in first.names)
    assert all(name.startswith("layers.12.") for name in rest.names)


def test_a_name_that_meets_nothing_is_refused_with_what_there_is():
    with pytest.raises(ConfigError, match=r"no weight is called 'v_porj'(.|\n)*layers.1.mlp.down_proj"):
        decoder_only(RecipeStep(part="decoder", weights=("v_porj",), bits=8))


def test_a_weight_of_two_steps_is_refused_by_name():
    with pytest.raises(ConfigError, match="layers.1.self_attn.v_proj of the decoder belongs to two steps"):
        decoder_only(RecipeStep(part="decoder", bits=4), RecipeStep(part="decoder", weights=("v_proj",), bits=8))


def test_a_weight_of_no_step_is_refused_by_name():
    with pytest.raises(ConfigError, match="says nothing of decoder: layers.1.mlp.up_proj, "):
        decoder_only(RecipeStep(part="decoder", weights=("v_proj", "down_proj"), bits=4))
    with pytest.raises(ConfigError, match="says nothing of vision: stem.conv"):
        resolve(recipe(*(RecipeStep(part=part, bits=8) for part in ("projector", "decoder", "embedding"))), SHAPES)


def test_a_part_that_is_not_there_is_refused_unless_it_may_be_missing():
    with pytest.raises(ConfigError, match="step for vision: the model has no weights there"):
        decoder_only(RecipeStep(part="vision", bits=8), RecipeStep(part="decoder", bits=4))


def test_groups_that_do_not_divide_fall_back_and_are_told():
    (found,) = resolve(recipe(RecipeStep(part="projector", bits=4, group_size=32)), {"projector": {"fc": (64, 48)}})

    assert found.grids["fc"][4] == Grid(bits=4, group_size=16)
    assert found.fallbacks == ("fc: width 48 is not a multiple of 32: groups of 16",)


def test_a_file_is_read_and_its_faults_are_told(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[steps]]\npart = "decoder"\nwidths = [3, 4, 8]\nmost_bits = 4.6\ngroup_size = 64\nround = "gptq"\n'
    )

    found = load(str(path))

    assert found.name == "mine"
    assert found.steps[0].all_bits == (3, 4, 8)
    for text, words in [
        ('[[steps]]\npart = "decodr"', "decodr"),
        ('[[steps]]\npart = "decoder"\nbit = 4', "bit"),
        ('[[steps]]\npart = "decoder"\nbits = 9', "9 bits"),
        ("[[steps]\n", "mine.toml"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load(str(path))
    with pytest.raises(ConfigError, match="no recipe is called 'w5'"):
        load("w5")


@pytest.mark.parametrize(
    "fields",
    [
        {"bits": 4, "activations": 8},
        {"widths": (3, 4)},
        {"bits": 4, "widths": (3, 4), "most_bits": 4.0},
        {"round": "gptq"},
    ],
)
def test_settings_that_contradict_one_another_are_refused(fields):
    with pytest.raises(ConfigError, match="step for decoder"):
        RecipeStep(part="decoder", **fields)
