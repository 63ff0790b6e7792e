// Every method of the table of what nodes ask each other, asked of a node: however it is served,
// the answers are the same.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "reshard/cluster/peer_table.h"

namespace ptc::testing {

using AskPeer = std::function<Result<std::string>(const PeerRow& row, const std::string& request)>;

/// A line for each row that a store answers: its name, and what became of it. `ask` asks a node
/// that has jobs without checkpoints and nothing in their incoming/. A row that may be asked again
/// is; its line says so where it answers otherwise then.
std::vector<std::string> answers_to_all(const AskPeer& ask, const WhichJob& job);
/// What they are of a job that is there, and of one that is not.
std::vector<std::string> expected_answers(bool is_there);

}  // namespace ptc::testing
