"""What is told of lanes and what is made of what is heard, on a clock that is a number."""

from __future__ import annotations

from rowmill.durations import Rate
from rowmill_contracts.shards import LaneStanding, OpenRequests
from rowmill_tool_gateway.lanes import Lane, ProbePolicy, Standing
from rowmill_tool_gateway.open_requests import OpenElsewhere
from rowmill_tool_gateway.pacing import Pace
from rowmill_tool_gateway.standings import Standings

PROBES = ProbePolicy(after=5, first=1.0, limit=30.0)


def lane(provider: str = "hunter", shard: int = 3) -> Lane:
    return Lane("acme", provider, shard, concurrency=8, pace=Pace(Rate(10, 1.0)), probes=PROBES, recovery=20.0)


def words(standings: Standings, now: float, *shards: int) -> list[LaneStanding]:
    return [telling.word for telling in standings.tell(shards, now)]


def test_what_changed_is_told_until_it_is_known_and_only_of_shards_that_are_ours() -> None:
    ours, others = lane(), lane("apollo", 4)
    standings = Standings(lambda: [ours, others])
    standings.heard([], [3], 0.0)
    assert words(standings, 0.0, 3, 4) == []
    ours.overrun(0.0, 60.0)
    others.overrun(0.0, 60.0)
    first = standings.tell([3, 4], 10.0)
    assert [telling.word for telling in first] == [LaneStanding("acme/hunter", 3, 50.0, 0.5, 0, 10.0)]
    standings.told(first, [4])
    assert words(standings, 20.0, 3) == [LaneStanding("acme/hunter", 3, 40.0, 0.5, 0, 20.0)], "it was told under a term that is over"
    standings.told(first, [3])
    assert words(standings, 20.0, 3) == []

    standings.lost(3)
    assert words(standings, 20.0, 3) == [], "nobody would believe it"
    standings.heard([], [3], 30.0)
    assert words(standings, 30.0, 3) == [LaneStanding("acme/hunter", 3, 30.0, 0.5, 0, 30.0)], "whoever had the shard did not know"


def test_a_closing_that_is_over_is_no_news_and_that_it_serves_is() -> None:
    closed = lane()
    standings = Standings(lambda: [closed])
    standings.heard([], [3], 0.0)
    closed.close(0.0, 60.0)
    standings.told(standings.tell([3], 0.0), [3])
    assert words(standings, 59.0, 3) == []
    assert words(standings, 61.0, 3) == []
    closed.served(61.0)
    assert words(standings, 62.0, 3) == [LaneStanding("acme/hunter", 3)], "as one that was never closed"


def test_missed_connections_are_told_once_one_request_at_a_time_finds_out() -> None:
    away = lane()
    standings = Standings(lambda: [away])
    standings.heard([], [3], 0.0)
    for _ in range(4):
        away.missed(0.0, 1.0)
    [said] = words(standings, 0.0, 3)
    assert (said.missed, said.away) == (0, 0.0)
    away.missed(0.0, 1.0)
    [said] = words(standings, 0.0, 3)
    assert (said.missed, said.closed) == (5, 1.0)


def test_what_is_urgent_is_that_a_lane_is_closed_for_longer_than_anyone_knows() -> None:
    closed = lane()
    standings = Standings(lambda: [closed])
    closed.close(0.0, 600.0)
    assert not standings.urgent(closed, 0.0, 2.0), "nobody would believe it"
    standings.heard([], [3], 0.0)
    assert standings.urgent(closed, 0.0, 2.0)
    assert not standings.urgent(closed, 598.5, 2.0)
    standings.told(standings.tell([3], 0.0), [3])
    assert not standings.urgent(closed, 1.0, 2.0)
    closed.close(1.0, 600.0)
    assert not standings.urgent(closed, 1.0, 2.0), "another answer to what was sent before"
    closed.close(1.0, 700.0)
    assert standings.urgent(closed, 1.0, 2.0)


def test_a_lane_learns_what_is_known_when_its_shard_becomes_ours_or_when_it_is_made() -> None:
    there = lane()
    lanes = [there]
    standings = Standings(lambda: lanes)
    said = [LaneStanding(name, 3, 60.0, 0.25, 7, 30.0) for name in ("acme/hunter", "acme/later")]
    standings.heard([*said, LaneStanding("acme/elsewhere", 9, 60.0)], [3], 100.0)
    later = lane("later")
    standings.opened_up(later)
    lanes.append(later)
    for known in lanes:
        assert known.standing == Standing(160.0, 0.25, 7, 70.0)
        assert (known.allowed, known.slots, known.kept_waiting) == (2, 1, True)
        assert known.pace is not None
        assert known.pace.per_second == 2.5
    assert words(standings, 100.0, 3) == []

    standings.lost(3)
    fresh = lane("later")
    standings.opened_up(fresh)
    assert fresh.standing == Standing()


def test_what_closed_a_lane_here_closes_it_still_and_what_was_sent_before_halves_nothing_twice() -> None:
    closed = lane()
    closed.overrun(0.0, 600.0)
    closed.learn(Standing(closed_until=60.0))
    assert closed.standing == Standing(closed_until=600.0)
    closed.learn(Standing(closed_until=900.0, share=0.5, away_since=0.0))
    closed.overrun(700.0, 10.0)
    assert (closed.share, closed.closed_until) == (0.5, 900.0)
    closed.overrun(901.0, 10.0)
    assert closed.share == 0.25


def test_what_answers_to_requests_that_were_left_open_closed_is_told_while_it_lasts() -> None:
    left = lane()
    ours: set[int] = set()
    elsewhere = OpenElsewhere(lambda: [left], ours.__contains__)
    left.opened(0.0)
    left.opened(0.0)
    assert elsewhere.said(elsewhere.ours(0.0)) == []
    left.finished(1.0)
    left.close(0.0, 60.0)
    elsewhere.closed(left)
    assert elsewhere.ours(10.0) == [OpenRequests("acme/hunter", 1, 50.0)]
    assert elsewhere.said(elsewhere.ours(10.0)) == [3], "whoever has the lane asks"
    assert elsewhere.ours(20.0, last=True) == [OpenRequests("acme/hunter", 0, 40.0)]
    left.finished(1.0)
    assert elsewhere.said(elsewhere.ours(20.0)) == [3]
    assert elsewhere.said(elsewhere.ours(30.0)) == []
    assert not elsewhere.told
    assert not elsewhere.news
    assert elsewhere.ours(61.0) == []
    left.close(70.0, 60.0)
    elsewhere.closed(left)
    ours.add(3)
    assert elsewhere.ours(70.0) == [], "it is told as what is known of a lane of ours"


def test_what_another_says_is_closed_is_closed_also_where_the_lane_has_its_first_call_later() -> None:
    there, later = lane(), lane("later")
    elsewhere = OpenElsewhere(lambda: [there], lambda _shard: True)
    there.close(0.0, 100.0)
    told = [OpenRequests("acme/hunter", 0, 60.0), OpenRequests("acme/later", 2, 60.0)]
    assert elsewhere.heard(told, 10.0) == set()
    elsewhere.opened_up(later, 20.0)
    assert (there.closed_until, later.closed_until, later.elsewhere) == (100.0, 70.0, 2)
    over = lane("later")
    elsewhere.opened_up(over, 80.0)
    assert over.standing == Standing()
