"""Cycles of a kernel's loops, on texts as libtpu writes them."""

import pytest

from inference.planner.compiled import bundles

# A loop over rows; in it one over blocks of pages of 64 bytes, which copies them in a loop, and
# stores new tokens, 32 bytes, in another.
_BUNDLES = """\
LB: loop body
= control target key end

     0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = sadd.s32 1, %s1 }
   0x2 LB: >> { %v1 = vld [vmem:[%s2] sm:$0xff] } /* Start region 7 */
   0x3 LB: >>> { %9 = dma.hbm_to_vmem /*hbm=*/%s3, /*size_in_granules=*/2, /*vmem=*/%s4 }
   0x4   : >>> { %10 = sbr.rel (!%p1) target bundleno = 3 (0x3), region = 9 }
   0x5   :  {}
   0x6   :  {}
   0x7   :  {}
   0x8   :  {}
   0x9 LB: >>> { %11 = dma.done.wait %s5, 1 }
   0xa   : >>> { %12 = sbr.rel (!%p2) target bundleno = 9 (0x9), region = 8 }
   0xb   :  {}
   0xc   :  {}
   0xd   :  {}
   0xe   :  {}
   0xf PF: >> { %13 = sbr.rel (%p4) target bundleno = 17 (0x11), region = 4 }
  0x10   : >> { %14 = vmatmul.mubr.bf16.gmra.mxu0 %v1 }
  0x11   : >> { %15 = sbr.rel (!%p3) target bundleno = 2 (0x2), region = 7 }
  0x12   :  {}
  0x13   :  {}
  0x14   :  {}
  0x15   :  {}
  0x16   : > { %16 = sbr.rel (!%p3) target bundleno = 1 (0x1), region = 1 }
  0x17   :  {}
  0x18   :  {}
  0x19   :  {}
  0x1a   :  {}
"""
_SLOTS = "== CAPACTIY:\nMXU, VLOAD, SALU\n    2     3     2\n== UTILIZATION:\n" + "".join(
    {2: "0 1 0\n", 3: "0 0 2\n", 16: "1 0 0\n"}.get(address, "0 0 0\n") for address in range(27)
)


def test_a_block_is_counted_with_the_copies_of_its_pages():
    whole = bundles.parse(_BUNDLES, _SLOTS)
    (rows,) = whole.loops
    (blocks,) = rows.loops
    assert [loop.cycles for loop in whole.walk()] == [1, 6, 8, 6, 6]
    assert [loop.multiplies for loop in whole.walk()] == [False, False, True, False, False]
    assert [loop.copies for loop in blocks.loops] == [{64}, {32}]
    block = blocks.block(page_bytes=64, num_pages=3)
    assert (block.cycles, block.slots) == (8 + 3 * 6, {"MXU": 1, "VLOAD": 1, "SALU": 6})
    assert rows.block(64, 3, num_products=2).cycles == 6 + 2 * 26


def test_schedules_are_found_by_the_name_of_their_kernel(tmp_path):
    bundles_name, slots_name = (
        tmp_path / f"17-paged_attention.1-{n:02}-{label}.txt"
        for n, label in enumerate((bundles._BUNDLES, bundles._SLOTS))
    )
    bundles_name.write_text(_BUNDLES, encoding="utf-8")
    slots_name.write_text(_SLOTS, encoding="utf-8")
    (tmp_path / "17-paged_attention.1-02-schedule-analysis_packed-bundles-post-ra.txt").touch()
    assert bundles.read(tmp_path, "paged_attention") == bundles.parse(_BUNDLES, _SLOTS)
    with pytest.raises(ValueError, match="has 0 schedules of a kernel RPA, not one"):
        bundles.read(tmp_path, "RPA")
    slots_name.write_text(_SLOTS + "0 0 0\n", encoding="utf-8")
    with pytest.raises(ValueError, match="a schedule of 27 bundles has slots of 28"):
        bundles.read(tmp_path, "paged_attention")
    assert str(tmp_path) in bundles.flags(tmp_path)
