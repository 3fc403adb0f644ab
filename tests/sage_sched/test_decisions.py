"""Decision tables: a situation, and the plan of its pass (tests/sage_sched/situations.py)."""

from __future__ import annotations

import pytest

from sage_sched.job import BEHIND
from tests.sage_sched.situations import decided

DECISIONS = [
    # While there is room, all are admitted in their order.
    ("wait 0:50 1:5", "+1 +0"),
    ("run 1:10; wait 0:10~<4000+5; free 20", "0; open 1"),
    ("wait 0:10~<4000+5; free 20", "^0"),
    ("wait 0:10 1:10; noswap", "0 1; open 2"),
    # In a full batch a job is admitted only by preempting another, which goes to host memory.
    ("run 0:500<50; wait 1:20 2:30<1000; full", "-0 +1 2"),
    ("run 0:500; wait 1:20k; full", "1"),
    ("run 0:500; wait 1:20; full; nopreempt", "1"),
    ("run 0:500; wait 1:20; full; host 500", "-0 +1"),
    ("run 0:500; wait 1:20; full; host 499", "1; no-host-room 1"),
    ("run 0:500 1:500; wait 2:20 3:20; full; host 1000", "-1 +2 -0 +3"),
    ("run 0:500 1:500; wait 2:20 3:20; full; host 999", "-1 +2 3; no-host-room 1"),
    # To compute KV again may be cheaper, but rounds differently.
    ("run 0:500; wait 1:20; full; move 1000000", "-0 +1"),
    ("run 0:500; wait 1:20; full; move 1000000; host 499", "1; no-host-room 1"),
    ("run 0:500 1:500; wait 2:20k 3:20; full", "2 3"),
    # It is left alone until a request comes or an index is refreshed.
    ("run 0:500<50+7; wait 1:20; full", "-0 +1"),
    ("run 0:500<50+7; wait 1:20; full; planned", "nothing"),
    ("run 0:500<500+200; wait 1:20; full; planned", "-0 +1"),
    ("run 0:500<500+203; wait 1:20; full; planned", "nothing"),
    ("run 0:500<500+203; wait 1:20; full; planned; drafts 4", "-0 +1"),
    ("run 0:500<50+7; wait 1:20; full; noswap", "nothing"),
    # No job is preempted for KV that others hold already.
    ("run 0:500<50 1:500<50; wait 2:400<50; free 300; slots 1", "-1 +2"),
    ("run 0:500<50 1:500<50; wait 2:400<50; free 300; slots 1; shared 2 380", "+2"),
    ("run 0:500<50 1:500<50; wait 3:450<50 2:400<50; free 300; slots 1; shared 2 380", "+2 -1 +3"),
    ("run 0:500<50 1:500<50; wait 3:450<50 2:400<50; free 300; slots 1; shared 3 380", "-1 +2 +3"),
    # The worst keys are preempted first, no more than needed, and none in vain.
    ("run 0:100; wait 1:20; free 1000", "+1"),
    ("run 0:100<1=50 1:300<1=50 2:200<1=50; wait 9:40<1; free 5; slots 1", "-1 +9"),
    ("run 0:100<1=50 1:300<1=50 2:200<1=50; wait 9:60<1; free 5; slots 1", "-1 -2 +9"),
    ("run 0:300<1=10 1:200<1=90; wait 9:60<1; free 5; slots 1", "-1 +9"),
    ("run 0:300<1=10; wait 1:60<1; free 5; slots 1", "1; open 1"),
    ("run 0:15<1=50 1:20<1=50; wait 9:17<1; free 5; slots 1", "-1 +9"),
    ("run 0:300<1=50#4 1:200<1=50#3; wait 9:20<1; free 5; slots 1", "-1 +9"),
    ("run 0:300<1=1; wait 9:5<1; slots 0; free 20", "-0 +9"),
    ("run 0:200<1=60 1:300<1=60; wait 5:40<1 6:40<1 7:40<1; free 5; slots 0",
     "-1 +5 -0 +6 7; open 1"),
    # A swapped job waits for all that SGLang reserves for prompts before it.
    ("run 3:1; wait 1:1<120+100 2:2~<10; slots 2; free 229; stay 3", "+1 2; open 1"),
    ("run 3:1; wait 1:1<120+100 2:2~<10; slots 2; free 230; stay 3", "+1 ^2"),
    # A job whose adapter finds no room is passed, unless it goes first.
    ("run 0:500; wait 1:20 2:30; full; fits 2", "-0 +2"),
    ("run 0:10; wait 1:20! 2:30; fits 2", ""),
    ("wait 0:10! 1:10! 2:10; fits-in-turn 0 2", "+0"),
    ("wait 1:20! 2:30; fits 2", "+2"),
    # If no KV can be swapped out, the engine passes swapped jobs, but not one that goes first.
    ("wait 0:10!~<4000+5 1:10; noswap", "0 1"),
    ("wait 0:10~<4000+5 1:10!; noswap", "1 0; open 2"),
    # A swapped job resumes, even if it is unranked or preemption is off.
    ("run 2:10; wait 0:10~<20+5 1:30", "^0 +1"),
    ("run 3:10; wait 2:20~<1000; nopreempt", "^2"),
    ("run 3:10; wait 2:20~?<1000; nopreempt", "^2"),
    # A job far enough above preempts at any price, a job that goes first included.
    ("run 0:600@10!; wait 1:500; full; gap 10", "1"),
    ("run 0:600@11!; wait 1:500; full; gap 10", "-0 +1"),
    ("run 0:600@40 1:600@20 2:600; wait 3:5; full; gap 10", "-0 +3"),
    ("run 0:600; wait 1:5@1; full; gap 10", "1"),
    # A best-effort job makes room for any other, but not for its like.
    (f"run 0:600@{BEHIND}; wait 1:500; full", "-0 +1"),
    (f"run 0:600@{BEHIND}=900; wait 1:700@9; full", "-0 +1"),
    (f"run 0:600@{BEHIND + 9}=900; wait 1:700@{BEHIND}; full", "1"),
    # Short prompts that go first are piggybacked on a chunk, which keeps a page.
    ("chunk 0:3000/512; run 1:50; wait 3:100 2:20", "+2 +3; chunk 392"),
    ("chunk 0:3000/512; run 1:50; wait 3:4000 2:20; noswap", "2 3; open 2; chunk 492"),
    ("chunk 0:3000/512; run 1:50; wait 2:511; page 16", "2; open 1; too-long 1"),
    ("chunk 0:3000/512; run 1:50; wait 2:481; page 16", "+2; chunk 16"),
    ("chunk 0:3000/512; run 1:50; wait 2:600 3:4000 4:700~+5", "^4 2 3; open 2; too-long 1"),
    ("chunk 0:3000/512; run 1:50; wait 2:400 3:300 4:100 5:600",
     "+4 +3 2 5; open 2; chunk 112; too-long 1"),
    ("chunk 0:3000/512; run 1:50; wait 2:4000", "2; open 1"),
    ("chunk 0:3000?/512; run 1:50; wait 2:20", "2; open 1"),
    ("chunk 0:3000?/512; run 1:50; wait -1:20", "+-1; chunk 492"),
    ("chunk 0:3000/512; run 1:50; wait -1:20? 2:5k 3:30", "+3 -1 2; open 2; chunk 482"),
    ("chunk 0:3000/512; run 3:50; wait 1:400@-1 2:20@1", "+1 2; open 1; chunk 112"),
    ("chunk 0:3000?/512; run 3:50; wait 1:400@-1 2:20@1", "+1 2; open 1; chunk 112"),
    ("chunk 0:3000/512; run 1:50; wait 2:600! 3:20", "2 3; open 2"),
    ("chunk 0:3000/512; run 1:50; wait -1:20?! 3:20", "-1 3; open 2"),
    ("chunk 0:3000!/512; run 1:50; wait 2:20", "2; open 1"),
    ("chunk 0:3000!/512; run 1:50; wait 2:20!", "2; open 1"),
    # The rest of the chunked prompt has memory and a slot set aside.
    ("chunk 0:3000/512; run 1:50; wait 5:20; free 2540; stay 1", "5; open 1"),
    ("chunk 0:3000/512; run 1:50; wait 5:20; free 2541; stay 1", "+5; chunk 492"),
    ("chunk 0:3000/512; run 1:50; wait 2:20; slots 1; stay 1", "2; open 1"),
    ("chunk 0:3000/512; run 1:50; wait 2:20; slots 2; stay 1", "+2; chunk 492"),
    ("chunk 0:3000/512; run 1:5000<50; wait 2:20 3:600; full; free 9000; slots 1",
     "-1 +2 3; chunk 492; too-long 1"),
    ("chunk 0:3000/512; run 1:5000<50; wait 3:600; full; free 9000; slots 1",
     "3; open 1; too-long 1"),
    # A prompt waits while another computes its prefix, unless it goes first.
    ("wait 0:2000 1:2100 2:2200; prefix 1900 0 1; pass 8000", "+0 +2 1"),
    ("run 0:2000+1; wait 1:2100; prefix 1900 0 1; pass 8000", "+1"),
    ("run 0:2000; wait 1:2100 2:2200; prefix 1900 0 1; pass 8000", "+2 1"),
    ("chunk 0:5000/1000; wait 1:2100 2:2200; prefix 1900 0 1; pass 8000", "+2 1; chunk 5800"),
    ("chunk 0:5000/1000; wait 1:2100 2:2200; prefix 1100 0 1; pass 8000", "+1 +2; chunk 3700"),
    ("wait 0:2000 1:2100; prefix 20 0 1; pass 8000", "+0 +1"),
    ("wait 0:2000 1:2100; prefix 1900 0 1; pass 8000; cached 0 1900 1 1900", "+0 +1"),
    ("wait 0:2000! 1:2100!; prefix 1900 0 1; pass 8000", "+0 +1"),
    # If memory runs out, the last of the order leave, and no job is admitted.
    ("run 0:50<4000+5 1:300<4000+5 2:200<4000+5; wait 99:1<4000+5; short", "-1"),
    ("run 0:1<4000+5 1:1<4000+5 2:1<4000+5; short", "-2 -1"),
    ("run 0:1<4000+5; short", ""),
    (f"run {' '.join(f'{n}:{10 + n}<4000+5' for n in range(10))}; short; move 0", "-9 -8 -7 -6"),
    ("run 0:1<4000+5 1:1<4000+5 2:1<4000+5; chunk 5:500<4000+5/100; short; free 150; pass 400",
     "-2 -1 -0"),
    ("run 0:1<4000+5 1:1<4000+5 2:1<4000+5; chunk 5:500<4000+5/100; short; free 150; pass 128", ""),
    ("run 0:3000!<4000+5 1:100<4000+5; short", "-1"),
    ("run 0:3000!<4000+5 1:100<4000+5 2:4000!<4000+5; short", "-1 -2"),
    ("run 0:300<4000+5 1:200<4000+5 2:50<4000+5; short; stay 0", "-1"),
    # Their KV is computed again if host memory has no room and it need not stay whole.
    ("run 0:10<4000+5 1:20<4000+5 2:21<4000+5; short; host 0", "=2 =1"),
    ("run 0:10<4000+5 1:20<4000+5 2:21<4000+5; short; host 0; whole", ""),
    ("run 0:10<4000+5 1:20<4000+5 2:21<4000+5; wait 5:1; short; nopreempt", "5; open 1"),
    ("run 0:10<4000+5 1:20<4000+5 2:21<4000+5; short; host 30; whole", "-2"),
    ("run 0:10<4000+5 1:6<4000+5 2:7<4000+5; short; host 10", "-0 =2"),
]  # fmt: skip


@pytest.mark.parametrize(("situation", "plan"), DECISIONS)
def test_a_pass_decides(situation: str, plan: str) -> None:
    assert decided(situation) == plan
