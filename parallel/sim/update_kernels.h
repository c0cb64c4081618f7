#pragma once

namespace megashard {
struct AdamWTable;
struct SquaresTable;
struct SquaresTotal;
}  // namespace megashard

namespace megashard::sim {

// For kernels_of_module().
void adamw(const AdamWTable& asked);
void squares(const SquaresTable& asked);
void squares_total(const SquaresTotal& asked);

}  // namespace megashard::sim
