package main

import "github.com/spf13/cobra"

// offer lets shells complete a flag with the values that it takes.
func offer(cmd *cobra.Command, flag string, values ...string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}
