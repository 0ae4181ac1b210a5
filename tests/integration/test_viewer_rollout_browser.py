"""The viewer's page of a rollout in a real headless browser: its turns, tokens and sequences.

Skipped, with the reason, where no Chromium is installed.
"""

import asyncio
import json
import os
import re
from dataclasses import replace

import pytest

from agent_environments.extraction import code_blocks
from loop_formats.collection_request import Limits
from loop_formats.run_files import read_rollouts
from support.browser import IN_A_BROWSER, true_in
from support.counter_node import TOKEN, counter_request, local_node
from support.small_runs import in_sequences
from support.viewer_pages import says, screenshot, show
from support.viewer_run import LONG_TOKENS, opened, write_run, write_values
from support.waiting import DEADLINE_S

pytestmark = IN_A_BROWSER


async def test_a_turn_that_failed_or_was_cut_is_seen_in_every_world(run_folder, tmp_path, viewing):
    """Whatever the words of its output: the record says it, or the output begins as an error does."""
    line = json.loads((run_folder / "node/collections/demo-i0001.jsonl").read_text().splitlines()[0])
    assert len(line["turns"]) >= 2
    line["turns"] = [turn | {"failed": place == 0} for place, turn in enumerate(line["turns"])]
    line["turns"][-1]["finish_reason"] = "length"
    line["messages"].append({"role": "user", "content": "Error: no such tool"})
    (tmp_path / "one.jsonl").write_text(json.dumps(line) + "\n")
    async with viewing(tmp_path / "one.jsonl") as (page, address):
        await show(page, address, "c/one/r/1", ".conversation")
        failed = [await each.inner_text() for each in await page.locator(".message.failed .output").all()]
        first = line["turns"][0]["message"] + 1
        assert [text.split("\n")[0] for text in failed] == [
            line["messages"][first]["content"].split("\n")[0],
            "Error: no such tool",
        ]
        assert "cut off by the limit of tokens" in await page.inner_text(".message.cut")
        ended = f"the episode ended: {line['end_reason']}, reward {line['reward']:.3f}"
        assert (await page.inner_text(".conversation")).endswith(ended)
        troubles = "[...document.querySelectorAll('.failed, .cut')]"
        for place in (0, 1, 2, 0):
            await page.keyboard.press("e")
            await true_in(page, f"{troubles}.findIndex(each => each.classList.contains('reached')) === {place}")
        assert await page.locator(".reached").count() == 1


@pytest.mark.parametrize("phone", [True, False], ids=["phone", "desktop"])
async def test_hostile_text_is_shown_and_never_run(run_folder, phone, viewing):
    async with viewing(run_folder, phone=phone) as (page, address):
        for hash_ in ("c/demo-i0003/r/25", "c/demo-i0003/t/hostile_1", "c/demo-i0003/r/25/tokens"):
            await show(page, address, hash_, ".tokens .token" if hash_.endswith("tokens") else ".conversation .code")
            assert await page.evaluate("window.hacked") is None
            assert await page.locator("main script, main img").count() == 0
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        # What is known of the chosen token stays in view, below a head of several lines too.
        await page.locator(".tokens .token").nth(300).click()
        free = "document.querySelector('.token-panel').contains(document.elementFromPoint(r.x + 20, r.y + 6))"
        await true_in(page, f"(r => {free})(document.querySelector('.token-panel').getBoundingClientRect())")
        await show(page, address, "c/demo-i0003/r/25", ".conversation .code")
        text = await page.locator(".conversation").first.text_content()
        for shown in ("<script>window.hacked = 1</script>", "‹U+202E›gnp.exe", "‹U+0000›‹U+001B›[31m", " broken "):
            assert shown in text
        assert len(text) < 100_000
        await page.locator(".more").first.click()
        await true_in(page, "document.querySelector('.conversation').textContent.length > 200000")


async def test_a_hundred_thousand_tokens_stay_quick(run_folder, viewing):
    async with viewing(run_folder) as (page, address):
        await show(page, address, "c/demo-i0003/r/26/tokens", ".tokens .token")
        await page.keyboard.press("End")
        await true_in(page, f"document.querySelector('.token.chosen')?.id === 't{LONG_TOKENS - 1}'")
        assert await page.locator(".tokens .token").count() < 20_000  # the rest is not in the document
        shown = await page.evaluate("getComputedStyle(document.querySelector('.token.chosen').parentElement).display")
        assert shown == "inline"  # a block would end a line where a chunk ends
        box = await page.evaluate(
            "(() => { const box = document.querySelector('.token.chosen').getBoundingClientRect();"
            "return [box.top >= 0, box.bottom <= innerHeight]; })()"
        )
        assert box == [True, True]
        await page.keyboard.press("ArrowUp")
        start = LONG_TOKENS - LONG_TOKENS // 80
        await true_in(page, f"document.querySelector('.token.chosen')?.id === 't{start}'")
        started = asyncio.get_running_loop().time()
        for _ in range(20):
            await page.keyboard.press("ArrowRight")
        await true_in(page, f"document.querySelector('.token.chosen')?.id === 't{start + 20}'")
        assert asyncio.get_running_loop().time() - started < 60.0


async def test_a_block_on_one_line_is_code_as_it_is_for_the_world(tmp_path, viewing):
    folder = write_run(tmp_path / "line", iterations=1, tasks=1, per_task=1)
    log = folder / "node/collections/demo-i0001.jsonl"
    rollout, *_ = read_rollouts(log)
    rollout.messages[2]["content"] = said = "I add ```python add(1)``` and\n```py\nadd(2)\n``` now."
    log.write_text(rollout.to_json() + "\n")
    async with viewing(folder) as (page, address):
        await show(page, address, "c/demo-i0001/r/1", ".conversation .code")
        shown = await page.locator('[data-turn="1"] .code').all_inner_texts()
    assert [text.strip() for text in shown] == code_blocks(said) == ["add(1)", "add(2)"]


async def test_tool_calls_are_set_apart_from_prose(tmp_path, viewing):
    folder = write_run(tmp_path / "calls", iterations=1, tasks=1, per_task=1)
    log = folder / "node/collections/demo-i0001.jsonl"
    rollout, *_ = read_rollouts(log)
    call = '<tool_call>\n{"name": "add", "arguments": {"n": 2}}\n</tool_call>'
    rollout.messages[2]["content"] = f"So.\n{call}\n<tool_call>{{}}</tool_call>\n<tool_call>cut"
    log.write_text(rollout.to_json() + "\n")
    async with viewing(folder) as (page, address):
        await show(page, address, "c/demo-i0001/r/1", ".conversation .code")
        shown = await page.locator('[data-turn="1"] pre').all_inner_texts()
        labels = await page.locator('[data-turn="1"] .role').all_inner_texts()
    assert [text.strip() for text in shown] == ["So.", '{\n  "n": 2\n}', "{}", "cut"]
    assert labels[1:] == ["calls add", *["a call that cannot be read"] * 2]


@pytest.mark.fault("tokens had a colour by fixed bounds, which a hundredth or none of a rollout's tokens crossed")
async def test_tokens_are_coloured_by_choice_and_stand_in_the_address(tmp_path, viewing):
    folder = write_run(tmp_path / "demo", iterations=1)
    file = folder / "token_statistics/demo-i0001.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[0]["ratios"][:2] = [1.0, 1.5]
    lines[0]["old_logprobs"][:2] = [lines[0]["old_logprobs"][0] - 0.005, lines[0]["old_logprobs"][1] - 1.0]
    sampled = len(lines[0]["ratios"])
    lines[0] |= {"advantages": [-0.75, 0.25, *[0.0] * (sampled - 2)], "entropies": [0.0, 3.0, *[0.5] * (sampled - 2)]}
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    start = opened(folder).rollout("demo-i0001", 1)["turns"][0]["start"]
    first, second = f"document.getElementById('t{start}')", f"document.getElementById('t{start + 1}')"
    async with viewing(folder) as (page, address):
        await show(page, address, "c/demo-i0001/r/1/tokens", ".tokens .token")
        legend = await page.locator(".legend").inner_text()
        assert re.search(r"log-prob, nats:\s*to ([\d.]+)\s*\1 to ([\d.]+)\s*\2 to", legend)
        await page.locator(".legend select").select_option("ratio")
        await true_in(page, f"{first}.classList.contains('s0') && {second}.classList.contains('s4')")
        assert "log of the ratio" in await page.locator(".legend").inner_text()
        for colour, shades in (("advantage", ("below2", "above1")), ("entropy", ("s0", "s4"))):
            await page.locator(".legend select").select_option(colour)
            has = "{}.classList.contains('{}')"
            await true_in(page, f"{has.format(first, shades[0])} && {has.format(second, shades[1])}")
            assert colour in await page.locator(".legend").inner_text()
        await page.locator(".legend select").select_option("gap")
        await true_in(page, f"/s[34]/.test({first}.className) && {second}.classList.contains('s4')")
        await page.locator(f"#t{start + 1}").click()
        await true_in(page, f"location.hash.endsWith('colour=gap&token={start + 2}')")
        panel = (await page.locator(".token-panel").inner_text()).replace("\n", " ")
        assert "advantage 0.2500 entropy 3.0000" in panel
        await screenshot(page, "tokens")
        await page.reload()
        await true_in(page, f"document.querySelector('.token.chosen')?.id === 't{start + 1}'")
        await true_in(page, f"{second}.classList.contains('s4')")
        assert await page.locator(".legend select").input_value() == "gap"


async def test_a_turn_is_gone_on_from_and_turn_values_are_drawn(policy, tmp_path, monkeypatch, viewing):
    """On the page of a live run; then, its node gone, the page says so."""
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", TOKEN)
    limits = Limits(max_turns=4, max_tokens_per_turn=64, max_context=1000, episode_deadline_s=DEADLINE_S)
    async with local_node(policy, tmp_path / "node") as local:
        local.vllm.speak = lambda rng: rng.choice(["```python\nadd(3)\n```", "```python\nadd(1)\n```"])
        request = counter_request("demo-i0001", tasks=["reach8_1"], rollouts_per_task=1, limits=limits)
        (rollout,), _ = await local.collect(request)
        write_values(tmp_path, rollout, {turn: [0.25, 0.5, 0.25 * turn] for turn in range(len(rollout.turns))})
        local.node.write_address(local.url, os.getpid())
        async with viewing(tmp_path) as (page, address):
            await show(page, address, "c/demo-i0001/r/1", ".turn-value meter")
            assert await page.locator(".turn-value").count() == 4
            await says(page, '[data-turn="2"]', "· this turn ")
            assert re.search(
                r"value 0\.\d\d ± 0\.\d\d · this turn [+-]?0\.\d\d", await page.inner_text('[data-turn="2"]')
            )
            await screenshot(page, "turn_values")
            local.vllm.speak = lambda rng: "```python\nfinish()\n```"
            await page.locator('[data-turn="3"] .go-on').click()
            await true_in(page, "location.hash.startsWith('#/c/branch-demo-i0001-')")
            await page.locator(".replayed").first.wait_for(state="attached")
            assert await page.locator(".replayed").count() == 2
            assert "goes on from demo-i0001/reach8_1/0.0 after 2 turns" in await page.inner_text("main")
            await says(page, '[data-turn="3"]', "finish()")
            await screenshot(page, "branch")
            await page.locator("main p a").filter(has_text="demo-i0001/reach8_1").click()
            await true_in(page, "location.hash === '#/c/demo-i0001/r/1'")


PROGRAM = {"refusals": [{"status": 400, "said": "too long <b>", "times": 2}], "exit_status": None, "output": "log in"}


async def test_an_episode_of_several_sequences(tmp_path, viewing):
    """Turns of other sequences, and what a harness wrote in the agent's name, are no turns of a sequence."""
    folder = write_run(tmp_path / "demo", iterations=2, tasks=1, per_task=3)
    log = folder / "node/collections/demo-i0001.jsonl"
    rollouts = read_rollouts(log)
    several = max(rollouts, key=lambda rollout: len(rollout.turns))
    inserted = [{"role": "assistant", "content": "Said by the harness."}, {"role": "user", "content": "Heard."}]
    sequences = []
    for sequence in in_sequences(several):
        own = 2 + 2 * sequence.segment
        messages = [*several.messages[:own], *inserted, *several.messages[own : own + 2], *inserted]
        last = sequence.segment + 1 == sequence.segments
        turns = [replace(turn, message=own + 2, summary=last) for turn in sequence.turns]
        extra = {"compaction": "summary", "harness": PROGRAM} if last else {"harness": PROGRAM}
        sequences.append(replace(sequence, messages=messages, turns=turns, extra=extra).validate())
    count = len(sequences)
    assert count > 1
    others = [rollout for rollout in rollouts if rollout is not several]
    log.write_text("".join(f"{rollout.to_json()}\n" for rollout in [*sequences, *others]))
    async with viewing(folder) as (page, address):
        await show(page, address, "c/demo-i0001", ".cell")
        assert await page.locator(".cell").count() == 3
        assert await page.inner_text("#shown") == "3 of 3 rollouts"
        await show(page, address, "c/demo-i0001/t/task0_1", ".column .code")
        assert await page.locator(".column").count() == 3
        await true_in(page, f"document.querySelectorAll('.column:first-child .sequence').length == {count - 1}")
        assert "go on from here" not in await page.locator(".column").first.inner_text()
        await show(page, address, f"c/demo-i0001/r/{count}", ".conversation .output")
        turns = page.locator(".conversation .assistant:not(.replayed)")
        assert await turns.count() == count, "each turn once, on the page of any of the sequences"
        assert [re.search(r"turn \d+", text)[0] for text in await turns.all_inner_texts()] == [
            f"turn {number + 1}" for number in range(count)
        ]
        await says(page, ".sequence", "sequence 2 begins here: another answer to the same messages")
        assert await page.locator(".sequence").last.inner_text() == (
            f"sequence {count} begins here: its history was too long (compaction: summary)"
        )
        await says(page, f'[data-turn="{count}"]', f"turn {count} · summary of the history ·")
        await says(page, ".conversation .assistant.replayed", "Said by the harness.")
        await says(page, ".conversation .assistant.replayed", "not sampled by the policy")
        await says(page, ".error", "its program was refused 2 times: 400 too long <b>")
        await show(page, address, f"c/demo-i0001/r/{count}/tokens", ".token")
        assert await page.locator('.tabs [aria-current="page"]').last.inner_text() == str(count)


async def test_without_a_node_nothing_can_be_gone_on_from(run_folder, viewing):
    async with viewing(run_folder) as (page, address):
        await show(page, address, "c/demo-i0001/r/1", ".conversation .message.assistant")
        assert await page.locator(".go-on").count() == 0


async def test_two_rollouts_stand_beside_each_other(run_folder, tmp_path, viewing):
    """Turn by turn, with the lines marked that the other lacks; and a turn has its seconds."""
    lines = [json.loads(line) for line in (run_folder / "node/collections/demo-i0001.jsonl").read_text().splitlines()]
    first = lines[0]
    other = json.loads(json.dumps(first)) | {"index": 1, "rollout_id": lines[1]["rollout_id"]}
    other["episode_id"] = lines[1]["episode_id"]
    place = other["turns"][0]["message"]
    other["messages"][place]["content"] += "\nprint('only here')"
    reminder = "\nAs a reminder\n\nTask: do what is asked."
    first["messages"][place + 1]["content"] += reminder
    other["messages"][place + 1]["content"] += reminder
    first["turns"][-1] |= {"sampling_seconds": 7.5, "finish_reason": "length", "failed": False}
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (first, other)))
    async with viewing(tmp_path / "two.jsonl") as (page, address):
        await show(page, address, "c/two/r/1", ".strip")
        assert await page.locator(".strip button").count() == len(first["turns"])
        assert "7.5 s to sample" in await page.locator(".strip button").last.get_attribute("title")
        assert await page.locator(".strip button.amber").count() == 1
        await page.locator("main select").select_option("2")
        await true_in(page, "location.hash === '#/beside/two/1/two/2'")
        await page.locator(".beside .turn").first.wait_for()
        assert await page.locator(".beside .turn").count() == 2 * len(first["turns"])
        marked = [text.strip() for text in await page.locator(".differs").all_inner_texts()]
        assert marked == ["print('only here')"]
        assert "As a reminder" not in await page.inner_text(".beside")
        assert await page.locator(".beside .same").count() == 2 * (len(first["turns"]) - 1)
        await screenshot(page, "beside")
        # One that looked something up first has one turn more, and nothing else is marked.
        turns = "[{action: 'look', output: 'x'}, {action: 'a', output: 'y'}, {action: 'b', output: 'z'}]"
        assert await page.evaluate(f"aligned({turns}, {turns}.slice(1))") == [[0, None], [1, 0], [2, 1]]
        assert await page.evaluate(f"aligned({turns}.slice(0, 2), {turns}.slice(2))") == [[0, 0], [1, None]]
        assert await page.evaluate(f"aligned([], {turns}.slice(2))") == [[None, 0]]
        await page.keyboard.press("u")
        await true_in(page, "location.hash === '#/c/two/r/1'")
