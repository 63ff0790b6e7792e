#include "reshard/plan/assignment.h"

namespace ptc {
namespace {

using Cost = __int128;
constexpr Cost kInfinite = Cost{1} << 126;

}  // namespace

std::vector<size_t> best_assignment(const std::vector<std::vector<uint64_t>>& values) {
  const size_t rows = values.size(), columns = rows == 0 ? 0 : values.front().size();
  // All values count more than all of the rows that get the column of their number.
  auto cost = [&](size_t row, size_t column) {
    return -(Cost{values[row][column]} * static_cast<int64_t>(rows + 1) + (row == column));
  };
  // Column `columns` is where a row waits that has none yet. A cost less the potentials of its row
  // and its column is never negative, and is 0 where the row has the column.
  const size_t none = rows;
  std::vector<Cost> of_row(rows), of_column(columns + 1);
  std::vector<size_t> row_of(columns + 1, none), came_from(columns + 1);
  for (size_t row = 0; row < rows; ++row) {
    std::vector<Cost> distance(columns, kInfinite);
    std::vector<bool> reached(columns + 1);
    size_t at = columns;
    row_of[at] = row;
    do {  // Dijkstra's way to a column that is free
      reached[at] = true;
      const size_t owner = row_of[at];
      Cost step = kInfinite;
      size_t next = columns;
      for (size_t column = 0; column < columns; ++column) {
        if (reached[column]) continue;
        const Cost reduced = cost(owner, column) - of_row[owner] - of_column[column];
        if (reduced < distance[column]) {
          distance[column] = reduced;
          came_from[column] = at;
        }
        if (distance[column] < step) {
          step = distance[column];
          next = column;
        }
      }
      for (size_t column = 0; column <= columns; ++column) {
        if (reached[column]) {
          of_row[row_of[column]] += step;
          of_column[column] -= step;
        } else {
          distance[column] -= step;
        }
      }
      at = next;
    } while (row_of[at] != none);
    for (; at != columns; at = came_from[at]) row_of[at] = row_of[came_from[at]];
  }
  std::vector<size_t> column_of(rows);
  for (size_t column = 0; column < columns; ++column)
    if (row_of[column] != none) column_of[row_of[column]] = column;
  return column_of;
}

}  // namespace ptc
