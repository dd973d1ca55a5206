"""Who is the spy: the game, the numbers of its rewards, and how its stages learn."""

from __future__ import annotations

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.schema import Config, ConfigError, Piece, load
from mmrl.core.episodes import join_episodes
from mmrl.core.protocols import Observer
from mmrl.core.rng import Stream
from mmrl.core.types import Frames, Media, Message, Part, Prompt
from mmrl.engines.play import Play
from mmrl.metrics import turns, win_rate
from mmrl.training.method import through_chain
from mmrl.training.score import score
from mmrl.vision.games.spy import (
    INVALID,
    OPEN,
    Spy,
    clue_rewards,
    code_reward,
    decision_reward,
    public,
    reasoning,
    vote_of,
    well_formed,
)
from tests.support.playing import Answering
from tests.support.toys import ToyText, plan


def image(name, value):
    pixels = torch.full((1, 3, 4, 6), value, dtype=torch.uint8)
    return Media("image", name, lambda: Frames(pixels, torch.zeros(1)))


def pair(uid="p0"):
    parts = (Part(media=image("original", 10)), Part(media=image("changed", 20)), Part("What is different?"))
    return Prompt(uid, (Message("user", parts),))


def spy_of(prompts, game, seed=0):
    """Find the spies that the engine draws."""
    stream = Stream(seed)
    return [game.begin(p, stream.generator("game", p.uid, 0)).spy for p in prompts]


def play(game, votes=None, prompt=None, seed=0, clue="a red circle"):
    """Play one game; `votes` are those of the voters in order."""
    prompt = prompt or pair()
    listed = iter(votes or [])

    def answer(asked):
        decides = "number of the spy" in asked.text
        return f"I think it over.\n\\boxed{{{next(listed)}}}" if decides else f"Hm.\n\\boxed{{{clue}}}"

    inner = Answering(ToyText(), answer)
    return Play(inner, game=game, stream=Stream(seed)).rollout([prompt]), inner


# ---- rewards


@pytest.mark.parametrize(
    ("spy", "civilians", "of_spy", "of_civilians"),
    [
        (3, (1, 0, 0, 0), -0.275, (-0.00625, 0.09375, 0.09375, 0.09375)),
        (0, (2, 1, 1, 0), 0.1, (-0.125, -0.025, -0.025, 0.075)),
        (1, (0,), -0.1, (0.1,)),  # one civilian: no penalty
    ],
)
def test_clue_rewards_are_those_of_the_paper_and_add_up_to_zero(spy, civilians, of_spy, of_civilians):
    found = clue_rewards(spy, civilians)
    assert found[0] == pytest.approx(of_spy) and found[1] == pytest.approx(list(of_civilians))
    assert found[0] + sum(found[1]) == pytest.approx(0)


def test_votes_are_rewarded_as_in_the_paper_and_as_in_its_code():
    assert [decision_reward(vote, 2) for vote in (2, OPEN, 1, INVALID)] == [1, -0.5, -1, -1]
    found = [code_reward(worth, form) for form in (True, False) for worth in (1, -0.5, -1)]
    assert found == pytest.approx([2.49, -0.3, -0.9, 1.89, -0.9, -1.5])


@pytest.mark.parametrize(
    ("answer", "vote"),
    [
        ("Player 2 saw blue.\n\\boxed{3}", 3),
        ("\\boxed{1} no, \\boxed{Player 4}", 4),
        ("\\boxed{N/A}", OPEN),
        ("n/a", OPEN),
        ("I think\nplayer 5", 5),
        ("\\boxed{7}", INVALID),  # there are five players
        ("\\boxed{0}", INVALID),
        ("\\boxed{nobody}", INVALID),
        ("", INVALID),
        *(
            (rf"\boxed{{{vote}}}", INVALID)
            for vote in ("12", "10", "-1", "1.5", r"\frac{1}{2}", "2%", "none")
        ),
        *((rf"\boxed{{{vote}}}", 3) for vote in (r"\text{Player 3}", "**3**", "３", "three", "3rd", "#3.")),
        ("2 clues point to player 4", 4),
        ("n.a.", OPEN),
    ],
)
def test_votes_are_read(answer, vote):
    assert vote_of(answer, 5) == vote


def test_the_public_part_of_an_answer_is_its_box_or_last_line():
    assert public("thinking\n\\boxed{a red  circle}") == "a red  circle"
    assert reasoning("thinking\n\\boxed{a red circle}") == "thinking"
    assert (public("one\n two \n\n"), reasoning("one\n two \n\n")) == ("two", "one")
    assert (public(""), reasoning("")) == ("", "")
    assert well_formed("eleven char\n\\boxed{1}") and not well_formed("ten chars.\n\\boxed{1}")
    assert not well_formed("eleven char\n\\boxed{}")


# ---- the game


def test_everybody_speaks_in_order_then_civilians_vote_at_once():
    game = Spy(civilians=3, rounds=2)
    rows, inner = play(game, votes=[1, 1, "N/A"])
    (spy,) = spy_of([pair()], game)
    assert [len(asked) for asked in inner.rounds] == [1] * 8 + [3]
    tags = [row.outcomes[-1].tags for row in rows]
    assert [tag["player"] for tag in tags[:8]] == list("12341234")
    assert [tag["role"] for tag in tags[:4]] == [("civilian", "spy")[n == spy] for n in (1, 2, 3, 4)]
    assert {tag["stage"] for tag in tags[:8]} == {"clue"} and {tag["role"] for tag in tags[8:]} == {"voter"}
    assert [tag["player"] for tag in tags[8:]] == [str(n) for n in (1, 2, 3, 4) if n != spy]
    for row, tag in zip(rows, tags, strict=True):
        shown = "changed" if tag["role"] == "spy" else "original"
        assert [media.name for media in row.prompt.media] == [shown]


def test_players_hear_public_clues_and_remember_their_own_thoughts_alone():
    rows, _ = play(Spy(civilians=3, rounds=2), votes=[1, 1, 1], clue="a <|im_end|> <image> circle")
    first, fifth, vote = (rows[place].prompt.text for place in (0, 4, 8))
    assert "Clues so far" not in first and "thoughts" not in first
    assert fifth.count("Player") == 4 and fifth.count("\nHm.") == 1
    assert "Player 4: a < |im_end|> < image> circle" in fifth  # marks cannot reach the next prompt
    assert vote.count("Player") == 8


@pytest.mark.parametrize("voters", ["civilians", "judge"])
def test_games_record_their_rewards(voters):
    vote_reward = "code" if voters == "judge" else "paper"
    game = Spy(civilians=4, rounds=1, voters=voters, num_votes=4, vote_reward=vote_reward)
    (spy,) = spy_of([pair()], game)
    first, *_ = others = [n for n in range(1, 6) if n != spy]
    rows, _ = play(game, votes=[spy, spy, spy, first])
    payoffs = {row.outcomes[-1].tags["player"]: row.outcomes[-1].recorded.get("payoff") for row in rows[:5]}
    assert payoffs[str(spy)] == pytest.approx(-0.275)
    assert [payoffs[str(n)] for n in others] == pytest.approx([-0.00625, 0.09375, 0.09375, 0.09375])
    votes = [row.outcomes[-1].recorded for row in rows[5:]]
    right, wrong = (2.49, -0.9) if voters == "judge" else (1.0, -1.0)
    assert [vote["payoff"] for vote in votes] == pytest.approx([right, right, right, wrong])
    assert [vote["right_vote"] for vote in votes] == [1, 1, 1, 0]
    assert {row.outcomes[-1].recorded["spy_caught"] for row in rows} == {1.0}


def test_a_game_without_a_readable_vote_teaches_no_clues_and_a_tie_catches_nobody():
    game = Spy(civilians=2, rounds=1)
    rows, _ = play(game, votes=["nobody", "N/A"])
    assert [row.outcomes[-1].recorded for row in rows[:3]] == [{"spy_caught": 0.0}] * 3
    assert [row.outcomes[-1].recorded["open_vote"] for row in rows[3:]] == [0, 1]
    (spy,) = spy_of([pair()], game)
    tied, _ = play(game, votes=[spy, next(n for n in (1, 2) if n != spy)])
    assert tied[-1].outcomes[-1].recorded["spy_caught"] == 0


def test_the_spy_may_see_a_blank_image_and_is_drawn_evenly():
    alone = Prompt("p0", (Message("user", (Part(media=image("original", 10)),)),))
    rows, _ = play(Spy(civilians=2, rounds=1, spy_sees="blank"), votes=[1, 1], prompt=alone)
    for row in rows:
        pixels = row.prompt.media[0].load().pixels
        assert pixels.shape == (1, 3, 4, 6)
        assert pixels.unique().tolist() == [255 if row.outcomes[-1].tags["role"] == "spy" else 10]
    drawn = spy_of([pair(f"p{n}") for n in range(300)], Spy(civilians=2))
    assert all(70 < drawn.count(number) < 130 for number in (1, 2, 3))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="at most 8 civilians, not 9"):
        Spy(civilians=9)
    with pytest.raises(ConfigError, match="must be one of|must be paper or code"):
        Pieces(Stream()).check("game", Piece("vision.spy", {"vote_reward": "none"}))
    with pytest.raises(ConfigError, match="does not read 'clues'"):
        Spy(template="{{ role }} {{ stage }}")
    with pytest.raises(ValueError, match="prompt 'p0' has 1 images; vision.image_pairs reads"):
        Spy().begin(Prompt("p0", (Message("user", (Part(media=image("original", 1)),)),)), torch.Generator())


# ---- learning


def test_the_method_file_has_the_advantages_of_the_paper_and_votes_learn_first():
    toys = {name: value for name, value in plan("").items() if name in ("policy", "data", "rollout")}
    config = load({"include": ["methods/grpo/vision_zero.yaml"], **toys}, kind=Config)
    stream = Stream()
    pieces = Pieces(stream)
    rewards, chain = pieces.make_field(config, "rewards"), pieces.make_field(config, "advantage")
    game = Spy(civilians=4, rounds=1)
    (spy,) = spy_of([pair()], game)
    first = next(n for n in range(1, 6) if n != spy)
    rows, _ = play(game, votes=[spy, spy, spy, first])
    table = score(rewards, rows)
    for observer in pieces.that_are(Observer).values():
        observer.observe(rows, table)
    credit = through_chain(chain, table, 0)
    found = {
        row.outcomes[-1].tags["player"]: value
        for row, value in zip(rows[:5], credit.values[:5, 0, 0].tolist(), strict=True)
    }
    # b = 0.05 r of the first collection: -0.01375 for the spy, 0.0034375 for the civilians.
    assert found[str(spy)] == pytest.approx(-0.26125)
    assert found[str(first)] == pytest.approx(-0.00625 - 0.0034375)
    assert sorted(found.values())[-1] == pytest.approx(0.09375 - 0.0034375)
    # Votes of one game: 1, 1, 1, -1, less 0.5, over the deviation of 1 (plus eps).
    assert credit.values[5:, 0, 0].tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5], rel=1e-3)
    assert credit.learn[:, 0].tolist() == [False] * 5 + [True] * 4
    whole = join_episodes(table)
    assert len(whole) == 1
    assert win_rate(whole, of="payoff", where={"role": "spy"}) == {"win_rate": 0.0}
    assert win_rate(whole, of="payoff", where={"role": "voter"}) == {"win_rate": 1.0}
    assert turns(whole, where={"stage": "clue"})["turns"] == 5
