#pragma once

#include <string>

namespace megashard {

/// Formatting of numbers; "-" for NaN and infinity.

std::string percent_text(double share);  ///< "41.2 %" for 0.412
std::string short_number(double value);  ///< four digits: "0.0012", "1.5e-05", "4.089", from 10,000 on "12.5k", "1.2M"
std::string byte_text(double bytes);     ///< "228.0 MiB", "3.20 GiB"
std::string duration_text(double seconds);  ///< "850 us", "41.6 ms", "12.0 s", "5 min", "2 h 05 min"

}  // namespace megashard
