from services.rollout.service import main

main()
