// There was no CBC when this was built.
#include "tools/planner/spase/time_indexed.h"

namespace ptc::planner {

bool TimeIndexedSearch::is_there() { return false; }
TimeIndexedSearch::TimeIndexedSearch(const Instance&, double, std::chrono::milliseconds) {}
TimeIndexedSearch::~TimeIndexedSearch() = default;
bool TimeIndexedSearch::goes_on() const { return false; }
std::optional<TimeIndexed> TimeIndexedSearch::found() { return std::nullopt; }

}  // namespace ptc::planner
