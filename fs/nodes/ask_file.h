// .ptc/ask: one question, one answer; what the ptc tool does beyond reading and writing files.
//
//   fd = open(".ptc/ask", O_RDWR); write(fd, "{\"do\":\"plan\",\"job\":\"llama\",…}"); read(fd, …)
//
//   {"do":"plan","job":J,"layout":{…}}              what an edit of layout.json would move
//   {"do":"verify","job":J,"checkpoint":C}          reads every stored byte, compares checksums
//   {"do":"remove","job":J,"checkpoint":C?,"force":bool}   a checkpoint; without one, the job
//   {"do":"drain","node":N,"cancel":bool}           empties a node, or takes it into service again
//
// Answers {"ok":true,"result":…} or {"ok":false,"code":"invalid argument","error":"…"}.
// plan and verify: who may read the job directory; remove: its owner, and root; drain: root, and
// whoever runs the daemon.
#pragma once

#include <chrono>

#include "fs/tree/tree.h"

namespace ptc {

FsResult<NodeRef> make_ask_file(Tree& tree);

/// False when an answer is still being worked on after `patience`; the tree must then stay.
bool wait_for_answers(std::chrono::milliseconds patience);

}  // namespace ptc
