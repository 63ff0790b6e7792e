// Of root's capabilities the daemon keeps those that it needs.
#pragma once

namespace ptc {

/// Gives the others up, for this process and all that it starts, and says in the log what does not
/// work for want of one. Of a daemon that is not root there is nothing to keep. Call it before the
/// first thread is started.
void keep_needed_capabilities();

}  // namespace ptc
