// The mixed-integer program of 2309.01226 as a file, for solvers that ptcfs does not bring.
//
// Of tasks t with configurations s (g_ts GPUs, R_ts seconds) on nodes n with GPUs g:
//
//   B_t_s    1: t has configuration s          O_t_n    1: it runs on node n
//   P_t_n_g  1: it has GPU g there             I_t_n_g  when it starts there
//   A_a_b    0: a comes before b, where they share a GPU; 1: b does
//
//   min C    C ≥ I_tng + R_ts − U(1−B_ts)      Σ_s B_ts = 1,  Σ_n O_tn = 1
//   Σ_g P_tng = g_ts where O_tn = B_ts = 1,    Σ_g P_tng ≤ G_n O_tn
//   I_tng = I_t00: one start on all GPUs
//   I_ang + R_as ≤ I_bng + U(3 − P_ang − P_bng − B_as + A_ab)     a < b
//   I_bng + R_bs ≤ I_ang + U(4 − P_ang − P_bng − B_bs − A_ab)
//
// U is what all take one after the other, each as long as it can. A model of n tasks has n²·GPUs
// rows and more: good for some tens. A task is on one node, as in the paper: configurations over
// several are left out.
#pragma once

#include <string>

#include "store/base/error.h"
#include "tools/planner/spase/instance.h"

namespace ptc::planner {

/// In CPLEX's LP format, with the tasks' names as comments. kInvalidArgument: a task that one node
/// has no room for, or more than a million rows.
Result<std::string> literal_model(const Instance& instance);

}  // namespace ptc::planner
