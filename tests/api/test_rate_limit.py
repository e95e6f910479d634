"""How many requests a minute: per key, per address of refused keys, shared by processes, and never for want of Redis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from api.rate_limit import RateLimit, network_of
from api.sse import StreamLimits
from jobs.live import Live
from jobs.settings import Settings
from tests.api.conftest import Server, eventually
from tests.conftest import ValkeyServer

JOBS = "/v1/fine_tuning/jobs"
KEY = "a-key-of-the-operator"


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def live(settings: Settings) -> Iterator[Live]:
    client = Live.connect(settings)
    yield client
    client.close()


@pytest.fixture
def limited(api_settings: Settings, limits: StreamLimits) -> Iterator[Server]:
    running = Server(replace(api_settings, api_key=KEY, rate_limit_per_minute=5, refused_limit_per_minute=3), limits)
    yield running
    running.stop()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class TestBucket:
    def test_a_burst_then_the_rate(self, live: Live) -> None:
        clock = Clock()
        limit = RateLimit(live, 60, clock=clock)
        taken = [limit.take("a") for _ in range(61)]
        assert [allowance.remaining for allowance in taken[:3] if allowance] == [59, 58, 57]
        assert taken[-1] is not None
        assert taken[-1].wait_s == pytest.approx(1.0)
        clock.now += 1.0
        waits = [allowance.wait_s for _ in range(2) if (allowance := limit.take("a")) is not None]
        assert waits == [0.0, pytest.approx(1.0)]
        other = limit.take("b")
        assert other is not None
        assert other.remaining == 59
        limit.close()

    def test_zero_is_no_limit(self, live: Live) -> None:
        assert RateLimit(live, 0).take("a") is None

    def test_what_one_process_lets_through_another_counts(self, live: Live) -> None:
        one, two = RateLimit(live, 100), RateLimit(live, 100)
        for _ in range(60):
            one.take("a")

        def knows() -> bool:
            allowance = two.take("a")
            return allowance is not None and allowance.remaining < 41

        eventually(knows)
        for _ in range(30):
            two.take("a")

        def is_told_back() -> bool:
            allowance = one.take("b") and one.take("a")
            return allowance is not None and allowance.remaining < 12

        eventually(is_told_back)
        one.close()
        two.close()

    def test_without_redis_each_counts_for_itself(self, settings: Settings, own_valkey: ValkeyServer) -> None:
        live = Live.connect(replace(settings, redis_url=own_valkey.url))
        own_valkey.kill()
        limit = RateLimit(live, 10, clock=Clock())
        waits = [allowance.wait_s for _ in range(11) if (allowance := limit.take("a")) is not None]
        assert waits == [0.0] * 10 + [pytest.approx(6.0)]
        limit.close()
        live.close()

    def test_many_clients_keep_few_buckets(self, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("api.rate_limit._MAX_BUCKETS", 3)
        limit = RateLimit(live, 10)
        for number in range(50):
            limit.take(str(number))
        assert len(limit._buckets) == 3
        limit.close()

    @pytest.mark.parametrize(
        ("address", "network"),
        [("10.0.0.7", "10.0.0.7"), ("::ffff:10.0.0.7", "10.0.0.7"), ("2001:db8::1:2", "2001:db8::/64"), ("unix", "unix")],
    )
    def test_an_ipv6_client_is_its_network(self, address: str, network: str) -> None:
        assert network_of(address) == network


class TestOverHttp:
    def test_a_key_is_told_what_is_left_and_then_to_wait(self, limited: Server) -> None:
        with limited.client(headers=bearer(KEY)) as client:
            answers = [client.get(JOBS) for _ in range(6)]
            assert [answer.status_code for answer in answers] == [200] * 5 + [429]
            assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["4", "3", "2", "1", "0", "0"]
            refused = answers[-1]
            assert refused.headers["x-ratelimit-limit-requests"] == "5"
            assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
            assert 1 <= int(refused.headers["retry-after"]) <= 12
            assert "x-should-retry" not in refused.headers
            error = refused.json()["error"]
            assert (error["code"], error["type"], error["param"]) == ("rate_limit_exceeded", "rate_limit_error", "authorization")
            assert client.get(f"{JOBS}/none").status_code == 429

    def test_errors_count_and_say_what_is_left(self, limited: Server) -> None:
        with limited.client(headers=bearer(KEY)) as client:
            answer = client.get(f"{JOBS}/none")
            assert (answer.status_code, answer.headers["x-ratelimit-remaining-requests"]) == (404, "4")

    def test_keys_do_not_share_and_public_routes_do_not_count(self, limited: Server) -> None:
        _, other = limited.app.state.services.ledger.create_api_key(name="ci", scopes=["read"])
        with limited.client() as client:
            for _ in range(20):
                answer = client.get("/healthz", headers=bearer(KEY))
                assert (answer.status_code, "x-ratelimit-limit-requests" in answer.headers) == (200, False)
            for _ in range(6):
                last = client.get(JOBS, headers=bearer(KEY))
            assert last.status_code == 429
            assert client.get(JOBS, headers=bearer(other)).status_code == 200

    def test_a_stream_counts_once(self, limited: Server) -> None:
        with limited.client(headers=bearer(KEY)) as client:
            assert client.get(f"{JOBS}/none/events/stream").headers["x-ratelimit-remaining-requests"] == "4"
            assert client.get(JOBS).headers["x-ratelimit-remaining-requests"] == "3"

    def test_an_address_with_wrong_keys_is_slowed_and_right_keys_from_there_are_not(self, limited: Server) -> None:
        with limited.client() as client:
            assert [client.get(JOBS, headers=bearer("wrong")).status_code for _ in range(5)] == [401, 401, 401, 429, 429]
            assert client.get(JOBS, headers=bearer(KEY)).status_code == 200

    def test_without_keys_there_is_no_limit(self, client: httpx.Client) -> None:
        answer = client.get(JOBS)
        assert (answer.status_code, "x-ratelimit-limit-requests" in answer.headers) == (200, False)
