// Where the tokens of a block lie in pages.
#pragma once
#include <array>

#include "kernels.h"
#include "strips.h"

namespace {

using BlockRows = std::array<const char*, kBlock>;

// By a table of the page tables, tokens from `start` on; that before `end` is repeated.
inline BlockRows block_rows(const ridgeline::Paged& p, int64_t row_bytes, int64_t table,
                            int64_t start, int64_t end) {
  auto page_of = [&](int64_t column) {
    const int64_t table_page = p.table[table * p.table_columns + column], last = p.num_pages - 1;
    const int64_t page = table_page < 0 ? 0 : table_page < last ? table_page : last;
    return (const char*)p.pages + page * p.page_tokens * row_bytes;
  };
  int64_t column = start / p.page_tokens, token = start % p.page_tokens;
  const char* row = page_of(column) + token * row_bytes;
  BlockRows rows;
  for (int s = 0; s < kBlock; s++) {
    rows[s] = row;
    if (start + s + 1 >= end) continue;
    if (++token < p.page_tokens) {
      row += row_bytes;
    } else {
      row = page_of(++column);
      token = 0;
    }
  }
  return rows;
}

}  // namespace
