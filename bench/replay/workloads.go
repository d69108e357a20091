package replay

import "time"

// Workloads returns the generated traces that a report without files is about.
func Workloads() []Workload {
	return []Workload{
		{
			Name: "chat", BlockTokens: 64, Requests: 8000,
			Parts: []Part{{
				Kind: "chat", Rate: 1, Prompts: 8, Skew: 1, Prompt: Length{1200, 0.3},
				First: Length{300, 1}, Next: Length{150, 1}, Output: Length{350, 0.8},
				Turns: 6, MaxTurns: 60, Think: 60 * time.Second, Limit: 32768,
			}},
		},
		{
			Name: "agents", BlockTokens: 64, Requests: 5000,
			Parts: []Part{{
				Kind: "agent", Rate: 0.1, Prompts: 6, Skew: 1, Prompt: Length{8000, 0.4},
				First: Length{3000, 0.8}, Next: Length{600, 1.2}, Output: Length{200, 0.8},
				Turns: 20, MaxTurns: 100, Think: 8 * time.Second, Branch: 0.15, Limit: 65536,
			}},
		},
		{
			Name: "retrieval", BlockTokens: 64, Requests: 8000,
			Parts: []Part{{
				Kind: "retrieval", Rate: 2, Prompts: 2, Skew: 1, Prompt: Length{600, 0},
				First: Length{60, 0.6}, Next: Length{60, 0.6}, Output: Length{250, 0.6},
				Turns: 1.5, MaxTurns: 8, Think: 30 * time.Second,
				Documents: 2000, DocumentSkew: 1, PerQuery: 5, Chunk: Length{500, 0.2}, Limit: 16384,
			}},
		},
		{
			Name: "mooncake-like", BlockTokens: 512, Requests: 12000,
			Note: "calibrated to the published conversation trace: 12,031 requests in 3,537 s, mean input 12,035 tokens and output 343, 37 % of the blocks reusable, one first block for all",
			Parts: []Part{{
				Kind: "chat", Rate: 2.15, Prompts: 1, Skew: 1, Prompt: Length{512, 0},
				First: Length{9300, 1.1}, Next: Length{3000, 1.6}, Output: Length{343, 0.9},
				Turns: 1.6, MaxTurns: 50, Think: 150 * time.Second, Limit: 126000,
			}},
		},
		{
			Name: "bailian-like", BlockTokens: 16, Requests: 10000,
			Note: "calibrated to what is published of the traces of Aliyun Bailian (arXiv 2506.02634): a half of people chatting, 80 % of whose reuses come within 10 minutes, and a half of programs with prompts of their own, single-turn, 80 % of whose reuses come within 10 s; 54 to 62 % of the tokens reusable; a tenth of the blocks with three quarters of the reuses",
			Parts: []Part{
				{
					Kind: "chat", Rate: 0.7, Prompts: 40, Skew: 0.9, Prompt: Length{500, 0.8},
					First: Length{900, 1.2}, Next: Length{250, 1.2}, Output: Length{430, 0.8},
					Turns: 2.6, MaxTurns: 40, Think: 120 * time.Second, Limit: 32768,
				},
				{
					Kind: "chat", Rate: 1.8, Prompts: 400, Skew: 1.1, Prompt: Length{1300, 1},
					First: Length{900, 1.2}, Output: Length{150, 1},
					Turns: 1, MaxTurns: 1, Limit: 32768,
				},
			},
		},
	}
}
